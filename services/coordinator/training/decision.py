"""Drafts one atomic decision: which draws to drop, which batch to seal, what to draw next. Pure."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, Protocol

from msgspec.structs import replace

from penstock.services.coordinator.training.draws import OpenDraw
from penstock.services.coordinator.training.gate import MAX_REDRAWS, Candidate, Verdict, choose, has_signal
from penstock.services.coordinator.training.hyperparameters import hyperparameters_of
from penstock.services.coordinator.training.inputs import Inputs, Rollback
from penstock.services.coordinator.training.ledger import NO_SIGNAL, WRONG_WEIGHTS, LedgerState
from penstock.services.coordinator.training.promotion import PromotionGate
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.protocol.events import (
    BatchRefused,
    BatchSealed,
    Drawn,
    Dropped,
    Event,
    Finished,
    PhaseChanged,
    SealedGroup,
    Tracking,
    encode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobFailure

__all__ = ["Draft", "DrawSource", "Progress", "RunFacts", "TicketSource", "copy_state", "plan_draw"]

ENTRY_BYTES = 896 << 10
"""Maximum bytes of batches that one decision seals: a ledger entry is one message of at most 1 MiB, and other events of
the decision need some of this space."""

Progress = tuple[Literal["True", "False"], str, str]
"""Status, reason as one word, and message of the condition `MakingProgress`."""


class RunFacts(Protocol):
    """State of a run that a decision reads, but never changes."""

    config: AnyTraining
    state: LedgerState
    candidates: dict[Draw, Candidate]
    stored: dict[int, int]
    stored_bytes: int
    num_ordinals: int | None
    row_bytes: int
    writer_epoch: int
    hold: Callable[[int], bool]
    source: DrawSource
    promotion: PromotionGate | None

    def rollback_of(self, state: LedgerState, inputs: Inputs) -> Rollback | None:
        """Return the rollback that ``state`` or ``inputs`` require, or None."""
        ...


class DrawSource(Protocol):
    """Source of a job's draws, which also chooses the draws of a batch."""

    redraws: bool
    """True if a dropped draw can be drawn again, with the same prompt."""

    @property
    def refuses(self) -> bool:
        """True if ``refusal`` can return a reason for any open draw."""
        ...

    def draw(self, draft: Draft) -> None:
        """Open draws in ``draft``, as many as there are free slots."""
        ...

    def refusal(self, draw: Draw) -> str:
        """Return the reason why an open draw must not be trained, even if its group has arrived, or '' if the draw may
        be trained."""
        ...

    def judge(self, draft: Draft) -> None:
        """Add the new results of a canary trial to ``draft``, before the promotion gate decides by them."""
        ...

    def choose(self, draft: Draft, ready: Sequence[Draw]) -> list[Draw] | None:
        """Return the draws of the next batch in training order, chosen from ``ready``; None if no batch can be sealed
        yet."""
        ...

    def values(self, draft: Draft, chosen: Sequence[Draw]) -> tuple[dict[Draw, float], Tracking]:
        """Return the baselines of a batch's draws, and the batch's update of the tracked mean rewards."""
        ...

    def idle(self, state: LedgerState) -> Progress:
        """Return the condition `MakingProgress` for a job that has no sealed batch to train."""
        ...


def plan_draw(config: AnyTraining, state: LedgerState, now: float, ahead: int = 0) -> tuple[int, float]:
    """Return ``(lowest policy version that may sample, deadline)`` of a draw for batch ``next_number + ahead``."""
    start = state.start_version(state.next_number + ahead)
    return max(0, start - config.train.max_lag), now + config.train.draw_timeout_s


def copy_state(state: LedgerState) -> LedgerState:
    """Copy the state and its dictionaries for a draft. The copies share the values in the dictionaries, which never
    change."""
    draft = copy.copy(state)
    draft.open = dict(state.open)
    draft.dropped, draft.dropped_tokens = state.dropped.copy(), state.dropped_tokens.copy()
    draft.sealed, draft.revisions = dict(state.sealed), dict(state.revisions)
    draft.batches, draft.checkpoints = dict(state.batches), dict(state.checkpoints)
    draft.admissions = dict(state.admissions)  # other fields are replaced, never changed
    return draft


class Draft:
    """Collects the events of one decision, and applies them to a copy of the ledger's state."""

    def __init__(self, run: RunFacts, state: LedgerState, inputs: Inputs) -> None:
        self.run, self.state, self.inputs, self.now = run, state, inputs, inputs.now
        self.config = run.config
        self.candidates = dict(run.candidates)
        self.acceptable: dict[Draw, Candidate] = {}
        """Groups that have arrived and that a batch may take, in order of arrival; ``drop`` finds them."""
        self.oldest_missing = math.inf
        """Lowest ``min_version`` of the draws in flight that have no group."""
        self.events: list[Event] = []
        self.freed_bytes = 0

    def add(self, event: Event) -> None:
        self.state.apply(event)
        self.events.append(event)

    # -- phases ------------------------------------------------------------------------------------------------------

    def phase(self) -> None:
        target = "paused" if self.inputs.desired == "paused" else "running"
        if self.state.phase != target:
            reason = "by request"
            self.add(PhaseChanged(writer_epoch=self.run.writer_epoch, time=self.now, phase=target, reason=reason))

    def end(
        self, phase: str, reason: str, summary: dict[str, object] | None = None, *, error: JobFailure | None = None
    ) -> None:
        if self.state.sealed:  # they will not be trained: refuse them, then drop their draws
            for number in sorted(self.state.sealed, reverse=True):
                sealed = self.state.sealed[number]
                self.add(
                    BatchRefused(
                        writer_epoch=self.run.writer_epoch, time=self.now, number=number, revision=sealed.revision,
                        bad=[], reason=phase, redraw=False, min_version=0, deadline=0.0,
                    )
                )  # fmt: skip
        self.drop_draws(sorted(self.state.open), phase if phase != "succeeded" else "run_ended", redraw=False)
        if self.state.phase != phase:
            code, service = ("", None) if error is None else (error.code, error.service)
            self.add(
                PhaseChanged(
                    writer_epoch=self.run.writer_epoch, time=self.now, phase=phase, reason=reason, code=code,
                    service=service or "",
                )
            )  # fmt: skip
        self.add(Finished(writer_epoch=self.run.writer_epoch, time=self.now, reason=phase, summary=summary or {}))

    def promote(self) -> None:
        """Let the promotion gate decide if the newest version is served, and add its decision."""
        gate = self.run.promotion
        if gate is None:
            return
        self.run.source.judge(self)
        event = gate.decide(self.state, self.inputs, writer_epoch=self.run.writer_epoch)
        if event is not None:
            self.add(event)

    # -- drops -------------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Drop each draw whose data was deleted, or whose group cannot be trained (bad, stale, or sampled from wrong
        weights). Drop a draw without a group if its deadline has passed, or if no worker can start on it before the
        next batch is trained.

        The remaining groups, which a batch may take, are then in ``acceptable``.
        """
        state, start = self.state, self.state.start_version(self.state.next_number)
        by_reason: dict[tuple[str, bool], list[Draw]] = {}
        lowest, now, accept, candidates = start - self.config.train.max_lag, self.now, Verdict.ACCEPT, self.candidates
        refuses, version, kept, missing = self.run.source.refuses, state.version, list[Candidate](), math.inf
        for draw, info in state.open.items():  # thousands per decision, so most get a quick check
            if info.batch:
                continue
            candidate = candidates.get(draw)
            if candidate is None:
                is_well = info.deadline > now and info.min_version <= start
            else:
                is_well = candidate.verdict is accept and candidate.oldest >= lowest and candidate.newest <= version
                is_well = is_well and not (candidate.header.weights and candidate.has_wrong_weights(state))
            if (refuses or not is_well) and (found := self._why_not(draw, info, start)) is not None:
                by_reason.setdefault(found, []).append(draw)
                continue
            if candidate is not None:
                kept.append(candidate)
            elif info.min_version < missing:
                missing = info.min_version
        kept.sort(key=attrgetter("seq"))
        self.acceptable, self.oldest_missing = {candidate.header.draw: candidate for candidate in kept}, missing
        for (reason, redraw), draws in sorted(by_reason.items()):
            self.drop_draws(sorted(draws), reason, redraw=redraw)

    def _why_not(self, draw: Draw, info: OpenDraw, start: int) -> tuple[str, bool] | None:
        """Return the reason to drop a draw, and True if it is drawn again; None if the draw is not dropped."""
        candidate = self.candidates.get(draw)
        if refusal := self.run.source.refusal(draw):
            return refusal, False
        if candidate is None:
            if info.deadline <= self.now:
                # If no groups arrive at all, the workers are away, so the prompts are not to blame.
                return "deadline", draw.n < MAX_REDRAWS or not self.run.candidates
            # A batch was refused: only later batches make that version, and no worker has started on the draw.
            replanned = info.min_version > start and self.run.source.redraws
            return ("replanned", True) if replanned else None
        if candidate.verdict is Verdict.SKIPPED:
            return candidate.header.skipped, False
        if candidate.verdict is not Verdict.ACCEPT:
            return str(candidate.verdict), draw.n < MAX_REDRAWS
        stale = candidate.is_stale(start, self.config.train.max_lag)
        reason = WRONG_WEIGHTS if candidate.has_wrong_weights(self.state) else "stale" if stale else ""
        return (reason, True) if reason else None

    def drop_draws(self, draws: list[Draw], reason: str, *, redraw: bool) -> None:
        if not draws:
            return
        gone = [self.candidates.pop(draw, None) for draw in draws]
        for draw in draws:
            self.acceptable.pop(draw, None)
        self.freed_bytes += sum(candidate.header.nbytes for candidate in gone if candidate is not None)
        min_version, deadline = plan_draw(self.config, self.state, self.now)
        redraw = redraw and self.run.source.redraws and self.inputs.desired != "cancelled"
        if redraw:
            self.oldest_missing = min(self.oldest_missing, min_version)
        self.add(
            Dropped(
                writer_epoch=self.run.writer_epoch,
                time=self.now,
                draws=draws,
                reason=reason,
                lengths=[candidate.mean_length if candidate else 0 for candidate in gone],
                redraw=redraw,
                min_version=min_version,
                deadline=deadline,
            )
        )

    def resample(self) -> None:
        """Drop groups without learning signal; in the same decision, ``draw`` opens draws of other prompts in their
        place.

        A batch resamples at most ``max_resampled`` times its size, and only while the data order has ordinals left;
        beyond that, groups without signal are trained.
        """
        dynamic, run = self.config.algorithm.dynamic_sampling, self.run
        if dynamic is None or not self.may_draw():
            return
        room = int(dynamic.max_resampled * self.config.groups_per_batch) - self.state.resampled
        if run.num_ordinals is not None:
            room = min(room, run.num_ordinals - self.state.next_ordinal)
        has_success = self.state.reports_success
        idle = [d for d, found in self.acceptable.items() if not has_signal(found.header, has_success=has_success)]
        self.drop_draws(sorted(idle)[: max(0, room)], NO_SIGNAL, redraw=False)

    # -- seal and draw -----------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Seal batches of the ``acceptable`` groups, as many as fit into one ledger entry; the next decision seals
        more."""
        unsealed = self.acceptable
        taken, largest = len(encode_events(self.events)), 0
        while taken + largest <= ENTRY_BYTES and self.may_seal():
            state, number = self.state, self.state.next_number
            start = state.start_version(number)
            lowest = start - self.config.train.max_lag
            ready = [draw for draw, candidate in unsealed.items() if candidate.oldest >= lowest]
            chosen = self.run.source.choose(self, ready)
            if chosen is None:
                return
            baselines, tracking = self.run.source.values(self, chosen)
            self.add(
                BatchSealed(
                    writer_epoch=self.run.writer_epoch,
                    time=self.now,
                    number=number,
                    revision=state.revisions.get(number, 0) + 1,
                    start_version=start,
                    update_index=state.update_index(number),
                    groups=self._entries(chosen, baselines),
                    hyperparameters=hyperparameters_of(state.settings),
                    tracking=tracking,
                )
            )
            for draw in chosen:
                del unsealed[draw]
            largest = len(encode_events(self.events[-1:]))
            taken += largest

    def _entries(self, chosen: Sequence[Draw], baselines: Mapping[Draw, float]) -> list[SealedGroup]:
        entries, admissions = [self.candidates[draw].entry for draw in chosen], self.state.admissions
        if not baselines and not admissions:
            return entries
        found = []
        for entry in entries:
            admission = admissions.get(entry.draw.ordinal)
            weight = 1.0 if admission is None else admission.weight
            found.append(replace(entry, baseline=baselines.get(entry.draw), weight=weight))
        return found

    def may_seal(self) -> bool:
        run, state = self.run, self.state
        if not self.may_draw():
            return False
        number = state.next_number
        if number - state.last_trained > self.config.train.max_lag + 1 or run.hold(state.update_index(number)):
            return False
        if run.promotion is not None and not run.promotion.lets_train(state, self.inputs.announced):
            return False
        remaining = self.remaining_batches()
        return remaining is None or remaining > 0

    def remaining_batches(self) -> int | None:
        """Return the number of batches that may still be sealed; None if it is unlimited.

        A batch that the trainer refused may still be sealed again, because batches sealed after it wait for it: even if
        they reach the limit, or exceed a limit that was lowered meanwhile.
        """
        limit, state = self.config.train.max_updates, self.state
        if limit is None:
            return None
        gap = bool(state.sealed) and not state.trainable and state.updates < limit
        return max(int(gap), limit - state.updates - len(state.sealed))

    def may_draw(self) -> bool:
        state, inputs = self.state, self.inputs
        wanted = state.phase == "running" and inputs.desired == "running" and not inputs.stop_early
        return wanted and self.run.rollback_of(state, inputs) is None

    def draw(self) -> None:
        if self.may_draw():
            self.run.source.draw(self)

    def byte_credits(self) -> int:
        """Return how many draws the byte budget allows in addition to those in flight, if all groups have the largest
        size."""
        in_flight = sum(1 for draw, info in self.state.open.items() if not info.batch and draw not in self.candidates)
        free = self.config.limits.byte_budget - self.run.stored_bytes + self.freed_bytes
        return max(0, free // (self.config.max_group_bytes + self.run.row_bytes) - in_flight)


class TicketSource:
    """Source that opens draws in the job's data order, up to the lag bound; each draw has a ticket for workers."""

    redraws = True
    refuses = False

    def refusal(self, draw: Draw) -> str:
        """Always return '': prompts belong to no user, so no deletion affects a draw."""
        return ""

    def judge(self, draft: Draft) -> None:
        """Do nothing: a job with tickets has no live conversations, and so no canary trial."""

    def choose(self, draft: Draft, ready: Sequence[Draw]) -> list[Draw] | None:
        """Return the draws of the next batch, or None if no batch can be sealed yet; see ``gate.choose``."""
        return choose(draft.config, draft.state, draft.acceptable, ready=ready, oldest_missing=draft.oldest_missing)

    def draw(self, draft: Draft) -> None:
        """Open draws for the next batches, as far as the lag bound, the limit of open draws and the byte budget
        allow."""
        run, state, config = draft.run, draft.state, draft.config
        size = config.groups_per_batch
        room = config.max_draws - len(state.open) - draft.inputs.replays
        if room <= 0:
            return
        planned = sorted(info.min_version for info in state.open.values() if not info.batch)
        remaining = draft.remaining_batches()
        if remaining is not None:
            room = min(room, max(0, remaining) * size - len(planned))
        if run.num_ordinals is not None:
            room = min(room, run.num_ordinals - state.next_ordinal)
        room = min(room, draft.byte_credits())
        ahead = 0
        while room > 0:
            # Beyond the lag bound, `oversample` draws for the next batch, to replace groups of it that get dropped.
            min_version, deadline = plan_draw(config, state, draft.now, min(ahead, config.train.max_lag))
            count = min(room, size * (ahead + 1) - bisect_right(planned, min_version))
            ahead += 1
            if count <= 0:
                continue
            draft.add(
                Drawn(
                    writer_epoch=run.writer_epoch, time=draft.now, start=state.next_ordinal,
                    stop=state.next_ordinal + count, min_version=min_version, deadline=deadline,
                )
            )  # fmt: skip
            planned = sorted([*planned, *[min_version] * count])
            room -= count

    def values(self, draft: Draft, chosen: Sequence[Draw]) -> tuple[dict[Draw, float], Tracking]:
        """Return no baseline values, because none are needed: each group contains the samples of its own baseline, or
        the loss uses no baseline."""
        return {}, Tracking()

    def idle(self, state: LedgerState) -> Progress:
        """Report progress, since workers process the tickets."""
        return "True", "Generating", ""
