"""Gate, ledger and dispatcher as one state machine against a world that misbehaves.

The world keeps what the real one keeps durably (ledger entries, stored groups, tickets) and loses what a real one may
lose (the leader's memory, in-flight work). Hypothesis reorders, duplicates, delays, crashes and fences at will.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.services.coordinator.queries.audit import audit_ledger
from penstock.services.coordinator.training import decision
from penstock.services.coordinator.training.gate import MAX_REDRAWS, Verdict
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.reports import Refusal
from penstock.services.coordinator.training.run import Effects, JobRun
from penstock.services.coordinator.training.snapshot import decode_snapshot, encode_snapshot
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import Conflict, ProtocolError
from penstock.shared.protocol.events import BatchSealed, BatchTrained, Drawn, Dropped, Event, LineageForked, Redrawn
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.trajectory import GroupHeader

EXAMPLES = 2000 if os.environ.get("PENSTOCK_FUZZ") == "full" else 500
"""Examples of the long test; ``make fuzz`` runs more."""
GROUP = 2
JOB = "job_machine"


def job(
    *, max_lag: int, staleness: str, groups: int, oversample: float, max_updates: int, max_resampled: float | None,
    tight: bool = False,
) -> JobConfig:  # fmt: skip
    """Return a job; with ``tight`` it has the smallest byte budget that a submission may have."""
    dynamic = None if max_resampled is None else {"max_resampled": max_resampled}
    config = JobConfig.parse(
        {
            "name": "machine",
            "model": {"config": {}, "tokenizer": "char"},
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "exact"}]},
            "algorithm": {"group_size": GROUP, "dynamic_sampling": dynamic},
            "sampling": {"max_new_tokens": 4},
            "train": {
                "batch_size": groups * GROUP,
                "max_updates": max_updates,
                "max_lag": max_lag,
                "staleness": staleness,
                "oversample": oversample,
                "draw_timeout_s": 100.0,
            },
        }
    )
    if not tight:
        return config
    budget = 2 * (max_lag + 2) * groups * config.max_group_bytes
    return config.model_copy(update={"limits": config.limits.model_copy(update={"byte_budget": budget})})


@dataclass
class World:
    """State that survives every crash."""

    entries: list[list[Event]] = field(default_factory=list)
    snapshots: list[bytes] = field(default_factory=list)
    stored: dict[int, GroupHeader] = field(default_factory=dict)
    later_parts: set[int] = field(default_factory=set)  # messages of stored groups beside the first one of each
    next_seq: int = 1
    tickets: dict[Draw, int] = field(default_factory=dict)  # draw -> min_version
    temperatures: dict[Draw, float] = field(default_factory=dict)
    engine_version: int = 0
    engine_weights: str = "w0"

    def append(self, entry: list[Event], expected: int) -> bool:
        """Append like the stream: refuse an entry whose writer does not know the last one; return False then."""
        if expected != len(self.entries):
            return False
        self.entries.append(entry)
        return True


class CoordinatorMachine(RuleBasedStateMachine):
    @initialize(
        max_lag=st.integers(0, 2),
        staleness=st.sampled_from(["wait", "in_order", "drop"]),
        groups=st.sampled_from([1, 2, 3, 3, 8]),
        oversample=st.sampled_from([1.0, 1.5, 2.0]),
        max_updates=st.sampled_from([2, 3, 6, 20]),
        max_resampled=st.sampled_from([None, 0.0, 1.0, 2.5]),
        num_ordinals=st.sampled_from([None, 6]),
        tight=st.booleans(),
        entry_bytes=st.sampled_from([decision.ENTRY_BYTES, 300]),
    )
    def begin(
        self, *, max_lag: int, staleness: str, groups: int, oversample: float, max_updates: int,
        max_resampled: float | None, num_ordinals: int | None, tight: bool, entry_bytes: int,
    ) -> None:  # fmt: skip
        self.config = job(
            max_lag=max_lag, staleness=staleness, groups=groups, oversample=oversample, max_updates=max_updates,
            max_resampled=max_resampled, tight=tight,
        )  # fmt: skip
        self.tight = tight
        self.entry_bytes = pytest.MonkeyPatch()
        self.entry_bytes.setattr(decision, "ENTRY_BYTES", entry_bytes)
        self.num_ordinals = num_ordinals
        self.world = World()
        self.now = 1000.0
        self.desired = "running"
        self.epoch = 1
        self.trainer_epoch = 1
        self.dead_letters = 0
        self.without_room: set[int] = set()
        """Numbers of entries that dropped a group while the byte budget had no room for a replacement."""
        self.known, self.answer = 0, "arrives"
        self.paused: tuple[JobRun, Inputs, int, int] | None = None
        self.run = self.new_leader()
        self.decide()
        self.report(Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="ckpt-0"))

    def teardown(self) -> None:
        if hasattr(self, "entry_bytes"):
            self.entry_bytes.undo()

    # -- the leader --------------------------------------------------------------------------------------------------

    def new_leader(self) -> JobRun:
        """Return a leader that knows only durable state, as after a crash."""
        covered, state = self.newest_snapshot()
        fold((event for entry in self.world.entries[covered:] for event in entry), state)
        run = JobRun(self.config, state, num_ordinals=self.num_ordinals, writer_epoch=self.epoch)
        self.known = len(self.world.entries)
        thorough = JobRun(self.config, state, num_ordinals=self.num_ordinals, writer_epoch=self.epoch)
        for seq, header in sorted(self.world.stored.items()):
            if thorough.on_group(seq, header) is Verdict.DUPLICATE:
                thorough.forget_stored([seq])
        first = run.take_up()
        for seq, header in sorted(self.world.stored.items(), key=lambda item: (item[0] < first, item[0])):
            if seq < first and seq in run.stored:
                continue
            assert seq >= first or header.draw not in state.open or state.open[header.draw].batch, "not read"
            if run.on_group(seq, header) is Verdict.DUPLICATE:
                run.forget_stored([seq])
                self.delete(range(seq, seq + header.num_messages))
        run.forget_stored([seq for seq in run.stored if seq not in self.world.stored])
        assert (run.candidates, run.stored) == (thorough.candidates, thorough.stored), "it read too little"
        assert run.stored_bytes == thorough.stored_bytes
        for draw in state.in_flight:
            if draw not in run.candidates:
                self.ask(draw, state)
        return run

    def lead_again(self) -> None:
        """Let a new leader take over from the ledger, with the phase that the user wants."""
        self.run = self.new_leader()
        self.decide()

    def ask(self, draw: Draw, state: LedgerState) -> None:
        """Publish a ticket, and check that every leader asks for the same temperature."""
        info = state.open[draw]
        assert info.temperature is not None
        assert self.world.temperatures.setdefault(draw, info.temperature) == info.temperature
        self.world.tickets[draw] = info.min_version

    def newest_snapshot(self) -> tuple[int, LedgerState]:
        """Return the number of entries that the newest valid snapshot covers, and its state."""
        for data in reversed(self.world.snapshots):
            try:
                snapshot, state = decode_snapshot(data, job=JOB)
            except ProtocolError:
                continue
            return snapshot.seq, state
        return 0, LedgerState()

    def append(self, events: list[Event]) -> None:
        if not events:
            return
        assert self.world.append(events, self.known)
        answer, self.answer = self.answer, "arrives"
        if answer == "lost in a crash":
            self.epoch += 1
            self.lead_again()
            return
        if answer == "lost":  # refused, but the entry is there: nothing is decided twice
            assert not self.world.append(events, self.known)
            assert self.world.entries[self.known :] == [events]
        self.known += 1
        self.carry_out(self.run, self.run.commit(events))

    def carry_out(self, run: JobRun, effects: Effects) -> None:
        for draw in effects.tickets:
            self.ask(draw, run.state)
        self.delete(effects.delete)
        if effects.purge_below is not None:
            self.world.stored = {s: h for s, h in self.world.stored.items() if s >= effects.purge_below}
            self.world.later_parts = {s for s in self.world.later_parts if s >= effects.purge_below}

    def delete(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self.world.stored.pop(seq, None)
            self.world.later_parts.discard(seq)

    def delete_duplicate(self, seq: int) -> None:
        self.run.forget_stored([seq])
        self.delete(range(seq, seq + self.world.stored[seq].num_messages))

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.now, desired=self.desired)

    def decide(self) -> None:
        events = self.run.decide(self.inputs)
        self.append(events)
        if any(isinstance(event, BatchSealed) for event in events):  # an entry has room for some batches only
            self.decide()

    def report(self, report: Report) -> bool:
        try:
            events = self.run.on_report(report, self.inputs)
        except Refusal:
            return False
        if events:
            self.append(events + self.run.decide(self.inputs, after=events))
            self.decide()  # as a leader does at once: only now the byte budget lacks what the report released
        return True

    # -- what may happen ---------------------------------------------------------------------------------------------

    def store(self, draw: Draw, oldest: int, bad: str = "") -> None:
        seq = self.world.next_seq
        size = 0 if bad == "skipped" else GROUP
        rewards = [1.0, 1.0] if bad == "no_signal" else [1.0, 0.0]
        self.world.stored[seq] = GroupHeader(
            draw=draw, attempt=f"a{seq}", epoch=self.epoch, digest=f"d{seq}", prompt_tokens=2,
            nbytes=self.config.max_group_bytes if self.tight else 2_500_000 if seq % 3 == 0 else 100,
            lengths=[2] * size, rewards=rewards[:size], failed=[bad == "failed"] * size, truncated=[False] * size,
            finite=bad != "nan", min_version=oldest, max_version=self.world.engine_version, worker="w",
            skipped="prompt_too_long" if bad == "skipped" else "", temperature=self.world.temperatures[draw],
            weights=sorted({self.weights_of(oldest), self.weights_of(self.world.engine_version)}),
        )  # fmt: skip
        self.world.next_seq += self.world.stored[seq].num_messages
        self.world.later_parts |= set(range(seq + 1, self.world.next_seq))

    def weights_of(self, version: int) -> tuple[int, str]:
        """Return a version and the weights that an engine has for it."""
        world = self.world
        return version, world.engine_weights if version == world.engine_version else self.recorded()[version]

    def recorded(self) -> dict[int, str]:
        """Return the weights of each version from the ledger."""
        events = [event for entry in self.world.entries for event in entry]
        return {0: "w0"} | {e.version: e.digest for e in events if isinstance(e, BatchTrained | LineageForked)}

    def show(self) -> None:
        """Let the engines load the newest version of the ledger."""
        self.world.engine_version, self.world.engine_weights = self.run.state.version, self.run.state.digest

    @rule(
        data=st.data(),
        bad=st.sampled_from(["", "", "", "failed", "nan", "skipped", "no_signal", "no_signal"]),
        keep=st.booleans(),
    )
    def generate(self, data: st.DataObject, bad: str, keep: bool) -> None:
        """Let a worker answer a ticket, maybe one that was answered before (a lost acknowledgement redelivers it).

        The tokens may come from an older policy than the ticket demands: the gate must not rely on workers here.
        """
        if not self.world.tickets:
            return
        draw = data.draw(st.sampled_from(sorted(self.world.tickets)))
        if not keep:
            self.world.tickets.pop(draw)
        newest = self.world.engine_version
        self.store(draw, data.draw(st.integers(max(0, newest - 3), newest)), bad)

    @rule(temperature=st.sampled_from([0.5, 1.0, 1.5]))
    def amend(self, temperature: float) -> None:
        """Let a user change the job file; draws in flight keep their old temperature."""
        sampling = self.config.sampling.model_copy(update={"temperature": temperature})
        self.config = self.config.model_copy(update={"sampling": sampling})
        self.append(self.run.amend(self.config, 2, self.now))

    @rule()
    def answer_all(self) -> None:
        """Answer every ticket that the engines may start with a valid group, and let the leader read all groups."""
        for draw, min_version in sorted(self.world.tickets.items()):
            if min_version <= self.world.engine_version:
                self.world.tickets.pop(draw)
                self.store(draw, self.world.engine_version)
        self.deliver_all()

    @rule()
    def answer_until_nothing_is_left(self) -> None:
        """Check that engines with the newest policy fill a batch if they answer every ticket that they may start."""
        self.show()
        for _ in range(MAX_REDRAWS + 2):
            self.answer_all()
        run = self.run
        over = self.desired != "running" or run.state.finished or run.failure or self.is_over
        exhausted = run.num_ordinals is not None and run.state.next_ordinal >= run.num_ordinals
        assert over or exhausted or run.state.sealed, f"no batch, no ticket to start: {self.world.tickets}"

    @property
    def is_over(self) -> bool:
        """True if nothing is drawn any more, or until a checkpoint frees room."""
        return self.run.training_done(self.inputs) or self.is_full

    @property
    def is_full(self) -> bool:
        """True while the job waits for a checkpoint, which frees room."""
        return self.run.wants_checkpoint(self.inputs) == "byte budget half used"

    @rule()
    def many_updates(self) -> None:
        """Train several batches without a checkpoint, until which the stream stores their groups."""
        for _ in range(4):
            self.one_update()

    @rule()
    def answer_all_alike(self) -> None:
        """Do the same as ``answer_all``, but with equal rewards in each group."""
        for draw, min_version in sorted(self.world.tickets.items()):
            if min_version <= self.world.engine_version:
                self.world.tickets.pop(draw)
                self.store(draw, self.world.engine_version, "no_signal")
        self.deliver_all()

    @rule()
    def one_update(self) -> None:
        """Take the usual course: answer, train, publish."""
        self.answer_all()
        self.train(publish=True)

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Let the leader read some stored groups, in any order, some twice."""
        if not self.world.stored:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.world.stored)), max_size=6))
        for seq in chosen:
            if seq in self.world.stored and self.run.on_group(seq, self.world.stored[seq]) is Verdict.DUPLICATE:
                self.delete_duplicate(seq)
        self.decide()

    @rule()
    def deliver_all(self) -> None:
        for seq in sorted(self.world.stored):
            if self.run.on_group(seq, self.world.stored[seq]) is Verdict.DUPLICATE:
                self.delete_duplicate(seq)
        self.decide()

    @rule(publish=st.booleans())
    def train(self, publish: bool) -> None:
        """Let the trainer train the next sealed batch; the engines get its weights now or later."""
        sealed = self.run.state.sealed.get(self.run.state.last_trained + 1)
        if sealed is None:
            return
        version = sealed.start_version + 1
        digest = f"w{version}.{self.trainer_epoch}"  # a successor gives other bits
        assert self.report(
            Report(
                kind="trained", epoch=self.trainer_epoch, batch=sealed.number, revision=sealed.revision,
                version=version, digest=digest,
            )
        )  # fmt: skip
        if publish:
            self.show()

    @rule()
    def publish(self) -> None:
        self.show()

    @rule()
    def trainer_shows_an_update_and_ends_before_its_report(self) -> None:
        """Let a trainer of an earlier release publish a version and die; its successor reuses the number."""
        sealed = self.run.state.sealed.get(self.run.state.last_trained + 1)
        if sealed is not None:
            self.world.engine_version = sealed.start_version + 1
            self.world.engine_weights = f"w{sealed.start_version + 1}.{self.trainer_epoch}"
            self.trainer_epoch += 1

    @rule()
    def train_again(self) -> None:
        """Check that a repeated report is harmless, and one with another digest or of a fenced trainer is refused."""
        number = self.run.state.last_trained
        known = self.run.state.batches.get(number)
        if known is None:
            return
        entries = len(self.world.entries)
        good = Report(
            kind="trained", epoch=self.trainer_epoch, batch=number, revision=known.revision,
            version=known.version, digest=known.digest,
        )  # fmt: skip
        assert self.report(good)
        assert not self.report(Report(kind="trained", epoch=self.trainer_epoch, batch=number, digest="other"))
        assert not self.report(Report(kind="trained", epoch=0, batch=number + 1, digest="other"))
        assert len(self.world.entries) == entries

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Let the trainer refuse a batch, because some of its groups are lost."""
        sealed = self.run.state.sealed.get(self.run.state.last_trained + 1)
        if sealed is None:
            return
        draws = [group.draw for group in sealed.groups]
        bad = data.draw(st.lists(st.sampled_from(draws), unique=True, max_size=len(draws)))
        self.report(
            Report(
                kind="refused", epoch=self.trainer_epoch, batch=sealed.number, revision=sealed.revision,
                bad=bad, reason="lost",
            )
        )  # fmt: skip

    @rule()
    def checkpoint(self) -> None:
        state = self.run.state
        if state.checkpoint is not None and state.last_trained > state.checkpoint.number:
            assert self.report(
                Report(
                    kind="checkpointed", epoch=self.trainer_epoch, batch=state.last_trained, version=state.version,
                    digest=state.digest, path=f"ckpt-{state.last_trained}",
                )
            )  # fmt: skip

    @rule()
    def trainer_crash_and_fork(self) -> None:
        """Let a restarted trainer fork, as it cannot reproduce the batches after its checkpoint."""
        state = self.run.state
        if state.checkpoint is None:
            return
        self.trainer_epoch += 1
        lost = [n for n in state.batches if n > state.checkpoint.number]
        if not lost:
            return
        version = state.version + 1
        digest = f"fork{version}"
        assert self.report(
            Report(
                kind="forked", epoch=self.trainer_epoch, batch=min(lost), version=version, digest=digest, reason="gone"
            )
        )
        self.show()

    @rule()
    def snapshot(self) -> None:
        self.world.snapshots.append(
            encode_snapshot(self.run.state, job=JOB, seq=len(self.world.entries), entry="of no interest here")
        )

    @precondition(lambda self: hasattr(self, "world") and self.world.snapshots)
    @rule(data=st.data())
    def damage_snapshot(self, data: st.DataObject) -> None:
        damaged = bytearray(self.world.snapshots[-1])
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 0xFF
        self.world.snapshots[-1] = bytes(damaged)

    @rule()
    def leader_crash(self) -> None:
        """Let another leader take over: it folds the newest snapshot and the later entries."""
        self.epoch += 1
        self.run = self.new_leader()
        self.decide()

    @rule(crash=st.booleans())
    def lose_the_answer_to_the_next_append(self, crash: bool) -> None:
        """Lose the reply to the next append; the next leader (after a crash) or the same leader finds the entry."""
        self.answer = "lost in a crash" if crash else "lost"

    @rule()
    def leader_is_replaced_while_it_lives(self) -> None:
        """Stop the leader for longer than its lease; the next leader writes, or has nothing to decide yet."""
        first: dict[Draw, int] = {}
        for seq, header in sorted(self.world.stored.items()):
            first.setdefault(header.draw, seq)
        in_order = all(first.get(draw) == found.seq for draw, found in self.run.candidates.items())
        if not in_order:  # the stream delivers in order; the rules above do not
            return
        self.paused = self.run, self.inputs, self.known, max(self.world.stored, default=0)
        self.epoch += 1
        self.lead_again()

    @precondition(lambda self: getattr(self, "paused", None) is not None)
    @rule(late_s=st.sampled_from([0.0, 150.0]))
    def the_old_leader_goes_on(self, late_s: float) -> None:
        """Let the old leader read new groups, decide and write: the stream refuses once another leader has written.

        A group that it deletes as a duplicate is a duplicate for all leaders.
        """
        assert self.paused is not None
        old, inputs, known, read_to = self.paused
        for seq, header in sorted(self.world.stored.items()):
            if seq > read_to and old.on_group(seq, header) is Verdict.DUPLICATE:
                self.delete(range(seq, seq + header.num_messages))
        self.paused = old, inputs, known, max(self.world.stored, default=read_to)
        events, before = old.decide(replace(inputs, now=self.now + late_s)), list(self.world.entries)
        if not events:
            return
        if not self.world.append(events, known):
            assert known < len(before), "refused although no other leader had written"
            assert self.world.entries == before
            self.paused = None  # fenced: it steps down
            return
        assert known == len(before), "the stream accepted an entry of a fenced leader"
        self.carry_out(old, old.commit(events))
        self.paused = old, inputs, known + 1, read_to
        assert not self.world.append(events, self.known), "the new leader must be refused at its next append"
        self.lead_again()

    @rule()
    def time_passes(self) -> None:
        self.now += 60.0
        self.decide()

    @rule(pause=st.booleans())
    def pause(self, pause: bool) -> None:
        self.desired = "paused" if pause else "running"
        self.decide()

    @precondition(lambda self: hasattr(self, "run") and self.run.state.open)
    @rule(data=st.data())
    def dead_letter(self, data: st.DataObject) -> None:
        draw = data.draw(st.sampled_from(sorted(self.run.state.open)))
        self.append(self.run.on_dead_letter(draw, self.inputs))
        self.decide()  # as the runner does; a draw that is dropped for good is replaced by another ordinal here

    @precondition(lambda self: hasattr(self, "run") and self.run.state.next_ordinal)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """Replay a new dead letter of a draw; several dead letters may belong to one draw."""
        self.dead_letters += 1
        draw = Draw(data.draw(st.integers(0, self.run.state.next_ordinal - 1)))
        with contextlib.suppress(Conflict):
            events = self.run.replay_dead_letter(self.dead_letters, draw, self.inputs)
            self.append(events)
            assert self.run.replay_dead_letter(self.dead_letters, draw, self.inputs) == []
        self.decide()

    # -- what must always hold ---------------------------------------------------------------------------------------

    @invariant()
    def ledger_balances(self) -> None:
        if not hasattr(self, "run"):
            return
        state = self.run.state
        assert state.drawn == state.trained + state.dropped.total() + len(state.open)
        refold = fold((event for entry in self.world.entries for event in entry), LedgerState())
        assert refold == state, "the leader's state is not the fold of the ledger"

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "run"):
            return
        covered, state = self.newest_snapshot()
        audit = audit_ledger(self.world.entries, self.config, {covered: state} if covered else {})
        assert not audit.violations, audit.violations
        forked = any(isinstance(event, LineageForked) for entry in self.world.entries for event in entry)
        assert forked or len(self.run.state.open) <= self.config.max_draws  # a fork redraws all at once
        trained = [e for entry in self.world.entries for e in entry if isinstance(e, BatchTrained)]
        versions = [event.version for event in trained]
        assert versions == sorted(set(versions))
        if self.config.train.max_lag == 0:
            for batch in audit.trained.values():
                assert all(g.min_version == g.max_version == batch.start_version for g in batch.groups)

    @invariant()
    def what_is_trained_came_from_the_weights_of_its_versions(self) -> None:
        """Check that each version number stands for one policy, even if engines once had others under it."""
        if not hasattr(self, "run"):
            return
        recorded = self.recorded()
        for batch in audit_ledger(self.world.entries, self.config).trained.values():
            for seq in (group.seq for group in batch.groups if group.seq in self.world.stored):
                assert all(recorded[version] == weights for version, weights in self.world.stored[seq].weights)

    @invariant()
    def resampling_is_bounded_and_replaces(self) -> None:
        """Check that a group without signal is replaced at once, by another ordinal, up to the bound for a batch.

        A replayed dead letter may replace it instead; a used up byte budget delays the replacement. Up to the bound
        no group without signal is trained.
        """
        if not hasattr(self, "run"):
            return
        state, run = self.run.state, self.run
        forked = any(isinstance(event, LineageForked) for entry in self.world.entries for event in entry)
        dynamic = self.config.algorithm.dynamic_sampling
        bound = 0 if dynamic is None else int(dynamic.max_resampled * self.config.groups_per_batch)
        since_seal = spare = 0
        is_full = decision.Draft(run, state, self.inputs).byte_credits() == 0
        for number, entry in enumerate(self.world.entries):
            for event in entry:
                if isinstance(event, BatchSealed):
                    since_seal = 0
                elif isinstance(event, Redrawn):
                    spare += 1
                elif isinstance(event, Dropped) and event.reason == "no_signal":
                    since_seal += len(event.draws)
                    assert since_seal <= bound
                    assert not event.redraw
                    drawn = sum(e.stop - e.start for e in entry if isinstance(e, Drawn))
                    spare -= max(0, len(event.draws) - drawn)
                    if spare < 0 and (is_full or number in self.without_room):  # drawn once a checkpoint frees bytes
                        self.without_room.add(number)
                        spare = 0
                    assert forked or spare >= 0, "a group was dropped and nothing was drawn instead"
        assert state.resampled == since_seal
        if self.desired != "running" or state.checkpoint is None:
            return
        dropped = [e for e in run.decide(self.inputs) if isinstance(e, Dropped)]
        gone = {draw for event in dropped for draw in event.draws}
        idle = {
            draw
            for draw, found in run.candidates.items()
            if found.verdict is Verdict.ACCEPT and len(set(found.header.rewards)) == 1 and not state.open[draw].batch
        }
        room = bound - since_seal
        if run.num_ordinals is not None:
            room = min(room, run.num_ordinals - state.next_ordinal)
        replaced = sum(len(event.draws) for event in dropped if event.reason == "no_signal")
        assert replaced <= room or not replaced
        assert replaced == room or not idle - gone, "a group without signal waits although it could be replaced"

    @invariant()
    def sealed_groups_are_stored(self) -> None:
        """Check that groups which a sealed batch or a restart needs are never deleted or purged."""
        if not hasattr(self, "run"):
            return
        state = self.run.state
        needed = {group.seq for batch in state.sealed.values() for group in batch.groups}
        after = state.checkpoint.number if state.checkpoint else 0
        needed |= {seq for number, batch in state.batches.items() if number > after for seq in batch.seqs}
        assert needed <= set(self.world.stored)
        parts = {part for seq, h in self.world.stored.items() for part in range(seq + 1, seq + h.num_messages)}
        assert parts == self.world.later_parts, "a group is stored whole or not at all"

    @invariant()
    def the_next_batch_can_be_filled(self) -> None:
        """Check that, without a sealed batch, enough open draws need only versions that exist."""
        if not hasattr(self, "run"):
            return
        run, state = self.run, self.run.state
        over = self.desired != "running" or state.finished or run.failure or self.is_over
        exhausted = run.num_ordinals is not None and state.next_ordinal >= run.num_ordinals
        if over or exhausted or state.sealed or state.checkpoint is None:
            return
        ready = [draw for draw, info in state.open.items() if info.min_version <= state.version]
        assert len(ready) >= self.config.groups_per_batch, f"{state.open} at version {state.version}"

    @invariant()
    def the_index_of_batches_is_exact(self) -> None:
        if not hasattr(self, "run"):
            return
        state = self.run.state
        held = {group.seq for batch in state.sealed.values() for group in batch.groups}
        assert self.run.batched == held | {seq for batch in state.batches.values() for seq in batch.seqs}

    @invariant()
    def groups_without_use_are_deleted(self) -> None:
        """Check that each group that the leader has read is waiting, sealed or trained on; others are deleted."""
        if not hasattr(self, "run"):
            return
        state = self.run.state
        useful = {candidate.seq for candidate in self.run.candidates.values()}
        useful |= {seq for batch in state.batches.values() for seq in batch.seqs}
        assert set(self.run.stored) & set(self.world.stored) <= useful


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(7200)
class TestCoordinatorMachineAtLength(CoordinatorMachine.TestCase):  # type: ignore[misc, name-defined]
    """The same machine with up to 25,000 steps; with 10^5 by ``make fuzz``."""

    settings = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None)
