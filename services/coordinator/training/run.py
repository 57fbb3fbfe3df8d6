"""One job's run: the pure core of the coordinator. It has no clock and no bus.

The runner passes in groups (by header), reports of the trainer, and with each call the ``Inputs``: the time and other
facts of that moment. ``decide`` returns the events of one atomic decision, which the runner appends to the ledger and
passes to ``commit``. ``commit`` returns the effects: tickets to publish, groups to delete, batches to announce. All of
them are derived from the ledger and safe to repeat. Only this module writes the fields of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from penstock.services.coordinator.training.decision import Draft, DrawSource, TicketSource, copy_state, plan_draw
from penstock.services.coordinator.training.gate import MAX_REDRAWS, Candidate, Verdict, judge
from penstock.services.coordinator.training.inputs import Inputs, Rollback
from penstock.services.coordinator.training.ledger import HALTED, LedgerState
from penstock.services.coordinator.training.promotion import PromotionGate
from penstock.services.coordinator.training.reports import events_of_report
from penstock.shared.config.jobs.amendable import settings_of
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.config.service import checkpoint_path
from penstock.shared.errors import Conflict
from penstock.shared.protocol.events import (
    BatchRefused,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Dropped,
    Event,
    Extended,
    JobStarted,
    LineageForked,
    PhaseChanged,
    Redrawn,
    SettingsChanged,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobFailure
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.parts import num_parts
from penstock.shared.protocol.trajectory import GroupHeader

__all__ = ["Effects", "JobRun"]

REPLAYED = 1000
"""Factor for attempt numbers: the draw that replays a dead letter has the attempt number ``id of the dead letter *
REPLAYED``. So no two draws are equal, because the attempt numbers of redraws stay far below this factor."""
FAILED_STREAK = 4
"""The job fails once consecutive groups without scores would fill this number of batches."""


@dataclass(slots=True)
class Effects:
    """Effects that the leader must carry out after events were committed.

    ``delete`` has the stream sequence numbers of messages to delete from EXPERIENCE, ``announce`` the numbers of sealed
    batches to announce.
    """

    tickets: list[Draw] = field(default_factory=list)
    delete: list[int] = field(default_factory=list)
    announce: list[int] = field(default_factory=list)
    purge_below: int | None = None


class JobRun:
    """State of one job on its leader.

    Args:
        config: the job.
        state: the folded ledger.
        num_ordinals: positions in the data order; None: unlimited.
        row_bytes: bytes that the largest data row adds to ``max_group_bytes`` of a group.
        writer_epoch: epoch of this leader, written to each of its events.
        hold: receives a number of completed updates; returns True if the next batch must not be sealed yet, because
            an evaluation needs the version, or its weights need a checkpoint.
        source: source of draws; default: the data order, by tickets.
        promotion: decides which version is served; None: the newest.
        failure: failure that the ledger records for a run that has ended.
        data_dir: directory that contains the checkpoints.
    """

    def __init__(
        self,
        config: AnyTraining,
        state: LedgerState,
        *,
        num_ordinals: int | None,
        row_bytes: int = 0,
        writer_epoch: int,
        hold: Callable[[int], bool] = lambda point: False,
        source: DrawSource | None = None,
        promotion: PromotionGate | None = None,
        failure: JobFailure | None = None,
        data_dir: Path = Path(),
    ) -> None:
        self.config = config
        self.state = state
        self.num_ordinals, self.row_bytes = num_ordinals, row_bytes
        self.writer_epoch = writer_epoch
        self.config_digest = xxhash.xxh3_64_hexdigest(config.model_dump_json().encode())
        self.hold = hold
        self.source: DrawSource = source or TicketSource()
        self.promotion = promotion
        self.data_dir = data_dir
        self.failed_rollbacks: dict[str, str] = {}
        """Request -> reason, of the rollbacks that the trainer could not carry out."""
        self.candidates: dict[Draw, Candidate] = {}
        self.stored: dict[int, int] = {}
        """Stream sequence number in EXPERIENCE (of the first message) -> bytes, of every group of this job in the
        stream."""
        self.stored_bytes = 0
        self.failed_streak = 0
        self.failure = failure
        self.batched = {group.seq for batch in state.sealed.values() for group in batch.groups}
        """Stream sequence numbers in EXPERIENCE of the groups in sealed or trained batches of this lineage."""
        self.batched.update(seq for batch in state.batches.values() for seq in batch.seqs)

    def fail(self, failure: JobFailure) -> None:
        """End the run with ``failure`` in the next decision, unless it has failed before."""
        self.failure = self.failure or failure

    def halted(self, inputs: Inputs) -> str:
        """Return the reason for which the trainer paused the job; '' if the trainer did not pause it, or a user has
        resumed it."""
        return self.state.halted if inputs.desired != "running" else ""

    def halt(self, reason: str, now: float) -> list[Event]:
        """Return the event that records that the trainer paused the job for ``reason``, or [] if the ledger has it."""
        if not self.state.started or self.state.finished or self.state.halted == reason:
            return []
        return [
            PhaseChanged(
                writer_epoch=self.writer_epoch, time=now, phase="paused", reason=reason, code=HALTED, service="trainer"
            )
        ]

    def rollback_of(self, state: LedgerState, inputs: Inputs) -> Rollback | None:
        """Return the rollback that is due, by request or because ``state`` has too many refused versions, or None."""
        asked = self._asked_rollback(inputs)
        if asked is not None or self.promotion is None:
            return asked
        return self.promotion.rollback(state)

    def _asked_rollback(self, inputs: Inputs) -> Rollback | None:
        asked = inputs.rollback
        return None if asked is None or asked.operation in self.failed_rollbacks else asked

    def give_up_rollback(self, inputs: Inputs, reason: str) -> None:
        """Mark a requested rollback as failed, because the trainer cannot read the checkpoint."""
        asked = self._asked_rollback(inputs)
        if asked is not None:
            self.failed_rollbacks[asked.operation] = reason

    def path_of(self, checkpoint: Checkpointed) -> Path:
        """Return the directory of a checkpoint on this host."""
        return checkpoint_path(self.data_dir, checkpoint.path)

    def rollback(self, inputs: Inputs) -> Rollback | None:
        """Return the rollback that is due in the current state, or None."""
        return self.rollback_of(self.state, inputs)

    def amend(self, config: AnyTraining, generation: int, now: float) -> list[Event]:
        """Use ``config`` from the next batch on; return the event that records it, or [] if no setting changes."""
        self.config, state, settings = config, self.state, settings_of(config)
        if not state.started or state.finished or settings == state.settings:
            return []
        number = state.next_number
        return [
            SettingsChanged(
                writer_epoch=self.writer_epoch, time=now, generation=generation, number=number,
                update_index=state.update_index(number), settings=settings,
            )
        ]  # fmt: skip

    def extend(self, extensions: int, now: float) -> list[Event]:
        """Return the event that continues a finished run, or [] if every requested extension is applied."""
        most = self.config.train.max_updates
        if not self.state.finished or extensions <= self.state.extensions or most is None:
            return []
        number = self.state.extensions + 1
        return [Extended(writer_epoch=self.writer_epoch, time=now, number=number, max_updates=most)]

    # -- facts -------------------------------------------------------------------------------------------------------

    def on_group(self, seq: int, header: GroupHeader) -> Verdict:
        """Return the verdict on a group that arrived in EXPERIENCE; the caller deletes a group with the verdict
        DUPLICATE."""
        if seq in self.stored or header.epoch > self.writer_epoch:  # repeated, or for another leader to judge
            return Verdict.ACCEPT
        self.stored[seq] = header.nbytes
        self.stored_bytes += header.nbytes
        info = self.state.open.get(header.draw)
        verdict = judge(
            header,
            info,
            taken=header.draw in self.candidates,
            smallest_group=self.config.algorithm.smallest_group,
            needs_baseline=self.config.algorithm.greedy_baseline,
        )
        if verdict is Verdict.DUPLICATE:
            return self._known(seq, header)
        self.candidates[header.draw] = Candidate(seq, header, verdict)
        if verdict is Verdict.FAILED:
            self.failed_streak += 1
            if self.failed_streak >= FAILED_STREAK * self.config.groups_per_batch:
                reason = header.error or "scorers failed on every completion"
                outcome = "were lost" if isinstance(self.config, EmbodiedJob) else "could not be scored"
                text = f"{self.failed_streak} groups in a row {outcome}: {reason}"
                self.fail(JobFailure(code="not_scored", message=text))
        elif verdict is Verdict.ACCEPT:
            self.failed_streak = 0
        return verdict

    def _known(self, seq: int, header: GroupHeader) -> Verdict:
        """Return the verdict on a group whose draw awaits no group: DUPLICATE, or ACCEPT if a batch contains this very
        group, as happens when a new leader reads stored groups again."""
        if seq not in self.batched:
            return Verdict.DUPLICATE
        if header.draw in self.state.open:  # that batch is not trained yet
            self.candidates[header.draw] = Candidate(seq, header, Verdict.ACCEPT)
        return Verdict.ACCEPT

    def take_up(self) -> int:
        """Restore the byte counts of the stored groups of trained batches from the ledger's state. Return the stream
        sequence number from which a new leader must read EXPERIENCE before it decides.

        The group of an open draw has that number or a higher one, so lower messages affect no decision. Ledgers of
        earlier versions lack the sizes of groups: then all groups are read.
        """
        state = self.state
        purged = max((checkpoint.low_seq for checkpoint in state.checkpoints.values()), default=0)
        if not all(batch.sizes or not batch.seqs for batch in state.batches.values()):
            return 1
        for batch in state.batches.values():
            self.stored.update((s, n) for s, n in zip(batch.seqs, batch.sizes, strict=True) if s >= purged)
        self.stored_bytes = sum(self.stored.values())
        return min((info.after for info in state.open.values()), default=state.heard) + 1

    def forget_stored(self, seqs: Iterable[int]) -> None:
        """Stop counting messages that are gone from EXPERIENCE."""
        for seq in seqs:
            self.stored_bytes -= self.stored.pop(seq, 0)

    @property
    def max_batches(self) -> int | None:
        """Number of policy updates of the whole run; None if the run continues until the data ends."""
        return self.config.train.max_updates

    def wants_checkpoint(self, inputs: Inputs) -> str:
        """Return the reason for which the trainer should write a checkpoint now, or '' if there is none."""
        state, checkpoint = self.state, self.state.checkpoint
        unwanted = inputs.desired == "cancelled" and not inputs.last_checkpoint
        if checkpoint is None or checkpoint.number >= state.last_trained or unwanted:
            return ""
        if self.stored_bytes * 2 >= self.config.limits.byte_budget:
            return "byte budget half used"
        training_done = self.training_done(inputs)
        if inputs.desired != "running" or training_done:
            return "run is at an end" if training_done else "pause"
        if self.rollback(inputs) is not None:  # these updates will be discarded
            return ""
        requested = "request" if inputs.checkpoint_requested else self._deletion_waits_after(checkpoint.number)
        if wanted := inputs.new_best or requested:
            return wanted
        return "interval" if state.last_trained - checkpoint.number >= self.config.checkpoint.every else ""

    def _deletion_waits_after(self, number: int) -> str:
        """Return the reason to write a checkpoint if a user's deletion waits for a checkpoint after batch ``number``,
        else ''."""
        if self.source.redraws:  # prompts belong to no user
            return ""
        after = (batch for trained, batch in self.state.batches.items() if trained > number)
        waits = any(self.source.refusal(draw) for batch in after for draw in batch.draws)
        return "deletion of a user's data" if waits else ""

    @property
    def unwanted(self) -> list[Draw]:
        """Draws of sealed batches that must no longer be trained, because a user's deletion covers their data."""
        if self.source.redraws:
            return []
        sealed = (group.draw for batch in self.state.sealed.values() for group in batch.groups)
        return sorted(draw for draw in sealed if self.source.refusal(draw))

    @property
    def batch_ready(self) -> bool:
        """True if no batch is sealed, and enough groups have arrived for the next batch."""
        if self.state.sealed or len(self.candidates) < self.config.groups_per_batch:
            return False
        waiting = sum(found.verdict is Verdict.ACCEPT for found in self.candidates.values())
        return waiting >= self.config.groups_per_batch

    @property
    def has_room(self) -> bool:
        """True if another draw may be in flight."""
        return len(self.state.open) < self.config.max_draws

    def training_done(self, inputs: Inputs) -> bool:
        """Return True if no further batch will be trained: no batch is ready for the trainer, and the run has reached
        its end or stops early."""
        if self.state.trainable or self.rollback(inputs) is not None:
            return False
        if inputs.stop_early:
            return True
        if self.max_batches is not None and self.state.updates >= self.max_batches:
            return True
        exhausted = self.num_ordinals is not None and self.state.next_ordinal >= self.num_ordinals
        return exhausted and len(self.state.in_flight) < self.config.groups_per_batch

    # -- decisions ---------------------------------------------------------------------------------------------------

    def decide(self, inputs: Inputs, after: Sequence[Event] = ()) -> list[Event]:
        """Return the events of the next atomic decision, or [] if nothing is due. Does not change the run.

        ``after`` are events that will be committed in the same decision, before the returned ones.
        """
        if self.state.finished:
            return []
        draft = Draft(self, copy_state(self.state), inputs)
        for event in after:
            draft.state.apply(event)
        state = draft.state
        if not state.started:
            return self._start(inputs)
        if self.failure is not None:
            draft.end("failed", self.failure.message, error=self.failure)
            return draft.events
        if inputs.desired == "cancelled" and self._may_cancel(state, inputs):
            draft.end("cancelled", "cancelled by request")
            return draft.events
        if state.checkpoint is None:  # the initial policy does not exist yet
            return []
        draft.phase()
        draft.promote()
        draft.drop()
        draft.resample()
        draft.seal()
        draft.draw()
        return draft.events

    def _start(self, inputs: Inputs) -> list[Event]:
        """Return the first event of the ledger, or [] until the job's simulator is described."""
        if self.lacks_environment(inputs) and inputs.desired != "cancelled" and self.failure is None:
            return []
        return [
            JobStarted(
                writer_epoch=self.writer_epoch, time=inputs.now, config_digest=self.config_digest,
                settings=settings_of(self.config), environment=inputs.environment or {},
            )
        ]  # fmt: skip

    def lacks_environment(self, inputs: Inputs) -> bool:
        """Return True if the job cannot begin before an env worker has described its simulator."""
        return isinstance(self.config, EmbodiedJob) and not self.state.started and inputs.environment is None

    def _may_cancel(self, state: LedgerState, inputs: Inputs) -> bool:
        """Return True if a cancelled run may end now.

        It first trains sealed batches and checkpoints, unless it must end now or its trainer cannot. Batches that wait
        for a refused one are not trained, because nothing is sealed any more.
        """
        checkpoint = state.checkpoint
        if inputs.cancel_now or self.halted(inputs) or checkpoint is None:
            return True
        unsaved = inputs.last_checkpoint and checkpoint.number < state.last_trained
        return not (state.trainable or unsaved)

    def finish(self, inputs: Inputs, summary: dict[str, object]) -> list[Event]:
        """Return the last decision of a finished run, which drops the draws in flight."""
        draft = Draft(self, copy_state(self.state), inputs)
        draft.end("succeeded", inputs.stop_early or "done", summary)
        return draft.events

    def on_report(self, report: Report, inputs: Inputs) -> list[Event]:
        """Return the events of a trainer's report, or [] if the ledger has the report already. Raises Refusal."""
        return events_of_report(self, report, inputs)

    def on_dead_letter(self, draw: Draw, inputs: Inputs) -> list[Event]:
        """Return the events that drop the draw of a dead letter; [] if the draw is not open, or if its group has
        arrived."""
        if draw not in self.state.open or self.state.open[draw].batch or draw in self.candidates:
            return []
        draft = Draft(self, copy_state(self.state), inputs)
        draft.drop_draws([draw], "dead_letter", redraw=draw.n < MAX_REDRAWS)
        return draft.events

    def replay_dead_letter(self, letter: int, draw: Draw, inputs: Inputs) -> list[Event]:
        """Return the event that draws a dead letter's prompt again, as a new attempt, or [] if that was done before.

        Raises:
            Conflict: the run draws nothing now, or has no room for a draw; or it never drew this prompt.
        """
        state = self.state
        if letter in state.replayed:
            return []
        draft, now = Draft(self, copy_state(state), inputs), inputs.now
        no_draws = not self.source.redraws or not draft.may_draw() or state.checkpoint is None
        if no_draws or self.training_done(inputs):
            raise Conflict("the job draws no prompts now: it is paused, at its end, or not fed by prompts")
        if not draft.byte_credits() or not self.has_room:
            raise Conflict("the byte budget of the job is used up, or all its draws are in flight; try again later")
        again = Draw(draw.ordinal, letter * REPLAYED)
        if draw.ordinal >= state.next_ordinal or again in state.open:
            raise Conflict(f"dead letter {letter} stands for draw {draw}: it was never drawn, or is open again")
        min_version, deadline = plan_draw(self.config, state, now)
        return [
            Redrawn(
                writer_epoch=self.writer_epoch, time=now, letter=letter,
                draw=again, min_version=min_version, deadline=deadline,
            )
        ]  # fmt: skip

    # -- commit ------------------------------------------------------------------------------------------------------

    def commit(self, events: Sequence[Event]) -> Effects:
        """Apply committed events to the state; return their effects."""
        effects = Effects()
        for event in events:
            before = set(self.state.open) if isinstance(event, LineageForked) else set()
            released = self._apply(event)
            match event:
                case Drawn() | Redrawn():
                    effects.tickets += _draws_of(event)
                case Dropped():
                    effects.delete += self._release(event.draws)
                    effects.tickets += [draw.again() for draw in event.draws] if event.redraw else []
                case BatchRefused():
                    effects.delete += self._release(event.bad)
                    effects.tickets += [draw.again() for draw in event.bad] if event.redraw else []
                case BatchSealed():
                    effects.announce.append(event.number)
                case BatchTrained():
                    for draw in self.state.batches[event.number].draws:
                        self.candidates.pop(draw, None)
                case Checkpointed():
                    effects.purge_below = event.low_seq
                    self.forget_stored([seq for seq in self.stored if seq < event.low_seq])
                case LineageForked():
                    self.candidates = {d: c for d, c in self.candidates.items() if d in self.state.open}
                    effects.delete += [message for seq in released for message in self._messages(seq)]
                    self.forget_stored(released)
                    effects.tickets += sorted(set(self.state.open) - before)
                case _:
                    pass
        effects.tickets = [draw for draw in effects.tickets if draw in self.state.open]  # these events may end the run
        return effects

    def _apply(self, event: Event) -> list[int]:
        """Apply one event to the state. Return the stream sequence numbers of the groups that no batch contains any
        more."""
        released: list[int] = []
        batches, sealed = self.state.batches, self.state.sealed
        match event:
            case BatchSealed():
                self.batched.update(group.seq for group in event.groups)
            case BatchRefused():
                released = [group.seq for group in sealed[event.number].groups]
            case LineageForked():
                released = self._rolled_back(event)
            case _:
                pass
        self.state.apply(event)
        if isinstance(event, Checkpointed):
            released = [seq for number in batches.keys() - self.state.batches.keys() for seq in batches[number].seqs]
        self.batched.difference_update(released)
        return released

    def _rolled_back(self, event: LineageForked) -> list[int]:
        """Return the stream sequence numbers of the groups that a fork discards: the groups of the trained batches that
        it removes, and of all sealed batches."""
        given_up = [batch.seqs for number, batch in self.state.batches.items() if number >= event.from_batch]
        given_up += [tuple(group.seq for group in batch.groups) for batch in self.state.sealed.values()]
        return [seq for seqs in given_up for seq in seqs]

    def _release(self, draws: Iterable[Draw]) -> list[int]:
        gone = [candidate for draw in draws if (candidate := self.candidates.pop(draw, None)) is not None]
        self.forget_stored(candidate.seq for candidate in gone)
        return [message for candidate in gone for message in candidate.messages]

    def _messages(self, seq: int) -> range:
        """Return the stream sequence numbers of the messages that contain the stored group whose first message has
        ``seq``."""
        return range(seq, seq + num_parts(self.stored.get(seq, 0)))


def _draws_of(event: Drawn | Redrawn) -> list[Draw]:
    """Return the draws that an event requests."""
    if isinstance(event, Redrawn):
        return [event.draw]
    return [Draw(ordinal) for ordinal in range(event.start, event.stop)]
