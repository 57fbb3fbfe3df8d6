"""Live interactions, feedback, admission and ledger as one state machine against a world that misbehaves. The world
keeps what the real one keeps durably (both streams, the ledger, stored groups) and loses the leader's memory.
Feedback comes early, late, twice, revised and retracted; leaders crash between any two steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.services.coordinator.online.groups import group_of
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import LiveSource
from penstock.services.coordinator.online.statuses import (
    UnrecordedDecisions,
    feedback_statuses,
    interaction_statuses,
)
from penstock.services.coordinator.queries.audit import audit_ledger
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event, Finished
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Feedback, FeedbackStatus, Interaction, InteractionStatus
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.trajectory import GroupHeader, encode_group

LAST = ("admitted", "rejected", "expired", "retracted", "trained")
NAMES = [f"i{n}" for n in range(60)]
EPISODES = [f"0192f0c1-0000-7000-8000-00000000000{n}" for n in range(3)]
KEYS = ["a", "b", "hostile"]


def job(
    *, max_lag: int, batch: int, gamma: float, share: float, default_after_s: float | None, unfinished: str = "judge"
) -> OnlineJob:
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "machine", "model": {"config": {}, "tokenizer": "char"},
            "sampling": {"max_new_tokens": 2}, "train": {"batch_size": batch, "max_lag": max_lag},
            "online": {
                "metrics": {"rating": {"type": "float", "default_after_s": default_after_s}}, "gamma": gamma,
                "max_wait_s": 20.0, "match_ttl_s": 50.0, "idle_ttl_s": 40.0, "max_share_per_key": share,
                "unfinished": unfinished,
            },
        }
    )  # fmt: skip


@dataclass
class World:
    """State that survives every crash."""

    entries: list[list[Event]] = field(default_factory=list)
    interactions: dict[int, Interaction] = field(default_factory=dict)
    feedback: dict[int, list[Feedback]] = field(default_factory=dict)
    stored: dict[int, GroupHeader] = field(default_factory=dict)
    statuses: list[FeedbackStatus] = field(default_factory=list)
    """Statuses of feedback that followed from ledger entries; those of the end of the job come last."""
    decided: dict[str, InteractionStatus] = field(default_factory=dict)
    """Status of each interaction, by the rule of ``InteractionStatus``."""
    rejected_for_space: set[str] = field(default_factory=set)
    """Interactions and feedback rejected for lack of room."""
    num_groups: int = 0

    engine_version: int = 0

    def take(self, statuses: list[InteractionStatus]) -> None:
        for one in statuses:
            if one.ordinal >= 0 or one.interaction not in self.decided:
                self.decided[one.interaction] = one


class OnlineMachine(RuleBasedStateMachine):
    @initialize(
        max_lag=st.integers(0, 2),
        batch=st.integers(2, 4),
        gamma=st.sampled_from([0.0, 1.0]),
        share=st.sampled_from([0.5, 1.0]),
        default_after_s=st.sampled_from([None, 15.0]),
        unfinished=st.sampled_from(["judge", "mask"]),
    )
    def begin(self, **choices: Any) -> None:
        self.config, self.world = job(**choices), World()
        self.now, self.epoch, self.served = 1000.0, 1, 0
        self.lead()
        self.report(Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="ckpt-0"))

    # -- the leader --------------------------------------------------------------------------------------------------

    def lead(self) -> None:
        """Start a leader that knows only durable state."""
        state = fold((event for entry in self.world.entries for event in entry), LedgerState())
        self.matching, self.unrecorded = Matching(self.config), UnrecordedDecisions()
        self.source = LiveSource(self.config, self.matching)
        self.run = self.core(state)
        for seq, header in sorted(self.world.stored.items()):
            self.run.on_group(seq, header)
        self.matching.restore(state)
        self.rebuild()
        self.cursor = list(state.read_from)
        self.decide()
        self.publish([draw for draw in state.in_flight if draw not in self.run.candidates])

    def rebuild(self) -> None:
        """Derive the statuses once more, from the ledger alone."""
        self.world.statuses, self.world.decided = [], {}
        state = LedgerState()
        for entry in self.world.entries:
            fold(entry, state)
            self.world.statuses += feedback_statuses(entry, state)
            self.world.take(interaction_statuses(entry, state))

    def core(self, state: LedgerState) -> JobRun:
        return JobRun(self.config, state, num_ordinals=None, writer_epoch=self.epoch, source=self.source)

    def measured(self) -> dict[str, float]:
        """Return the metrics of the next update."""
        return {}

    def note(self, statuses: list[FeedbackStatus]) -> None:
        self.unrecorded.add(statuses)

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.now)

    def decide(self) -> None:
        self.append(self.run.decide(self.inputs))

    def record(self) -> None:
        """Append unrecorded decisions on feedback and interactions before an entry moves ``read_from`` past them."""
        self.unrecorded.add_interactions(self.matching.refused_interactions.drain())
        self.unrecorded.close_episodes(self.matching.examples.closed.drain())
        if self.run.state.started:
            read_to = self.cursor[0], self.cursor[1]
            for event in self.unrecorded.drain(epoch=self.epoch, now=self.now, read_to=read_to):
                self.commit([event])

    def append(self, events: list[Event], *, crash: bool = False) -> None:
        if any(isinstance(event, Finished) for event in events):
            self.note(self.matching.on_job_end(self.now))
        self.record()
        if not events:
            return
        if crash:
            self.world.entries.append(events)
            return
        self.commit(events)

    def commit(self, events: list[Event]) -> None:
        self.world.entries.append(events)
        effects = self.run.commit(events)
        self.world.statuses += feedback_statuses(events, self.run.state)
        self.world.take(interaction_statuses(events, self.run.state))
        for event in events:
            if isinstance(event, Admitted):
                self.matching.on_admitted(event.admissions)
        self.publish(effects.tickets)
        for seq in effects.delete:
            self.world.stored.pop(seq, None)
        if effects.purge_below is not None:
            self.world.stored = {s: h for s, h in self.world.stored.items() if s >= effects.purge_below}

    def publish(self, draws: list[Draw]) -> None:
        for draw in draws:
            admission = self.run.state.admissions[draw.ordinal]
            turns = [self.world.interactions[seq] for seq in admission.interactions.values()]
            _, header = encode_group(group_of("j", draw, turns, reward=admission.reward, epoch=self.epoch))
            self.world.num_groups += 1
            self.world.stored[self.world.num_groups] = header
            self.run.on_group(self.world.num_groups, header)

    def report(self, report: Report) -> None:
        events = self.run.on_report(report, self.inputs)
        if events:
            self.append(events + self.run.decide(self.inputs, after=events))

    # -- what may happen ---------------------------------------------------------------------------------------------

    @rule(
        episode=st.sampled_from(["", "", *EPISODES[1:]]),
        old=st.integers(0, 2),
        broken=st.integers(0, 7),
        back=st.integers(0, 3),
    )
    def serve(self, episode: str, old: int, broken: int, back: int = 0) -> None:
        """Serve an answer to a new prompt, or to one that extends one of the newest turns of the episode."""
        if self.served == len(NAMES):
            return
        name = NAMES[self.served]
        self.served += 1
        version = max(0, self.world.engine_version - old)
        before = [one for one in self.world.interactions.values() if one.episode == episode][-back:] if back else []
        prompt = [*before[0].prompt_ids, *before[0].token_ids, 3] if before else [1]
        self.world.interactions[len(self.world.interactions) + 1] = Interaction(
            id=name, request=name, index=0, job="j", episode=episode or f"own-{name}", alone=not episode,
            key_id="asker", user="u", split="train", untrainable="client_disconnected" if broken == 1 else "",
            prompt_ids=prompt, token_ids=[2], logprobs=[-0.1],
            spans=[Span(version, 0, 1)], sampling=Sampling(max_new_tokens=2),
            finish="stop", template="", body_digest="", text="", tool_calls_valid=False if broken == 2 else None,
            started=self.now, first_token=self.now, ended=self.now,
        )  # fmt: skip

    @rule(
        name=st.integers(0, 60),
        back=st.integers(-2, 6),
        value=st.sampled_from([-1.0, 0.0, 1.0, 99.0]),
        key=st.sampled_from(KEYS),
        revision=st.integers(0, 2),
        kind=st.sampled_from(["metric"] * 5 + ["retraction", "correction"]),
        final=st.booleans(),
    )
    def post(self, *, name: int, back: int, value: float, key: str, revision: int, kind: Any, final: bool) -> None:
        """Post items alone or in one message; an id may come again, on any target."""
        about = NAMES[max(0, min(len(NAMES) - 1, self.served - back))]  # also one that is not served yet
        place = {"episode": EPISODES[back - 4]} if back > 4 else {"inference": about}
        body = {"feedback": f"f{(name + revision) % 60}"} if kind == "retraction" else {}
        item = Feedback(
            id=f"r{name}" if kind == "retraction" else f"f{name}", job="j", kind=kind, key_id=key, received=self.now,
            revision=revision, metric="rating", value=value, final=final, body=body, **place,
        )  # fmt: skip
        newest = len(self.world.feedback)
        if newest and self.cursor[1] <= newest and value == 0.0:
            self.world.feedback[newest].append(item)
        else:
            self.world.feedback[newest + 1] = [item]

    @rule(count=st.integers(1, 4), early=st.booleans(), key=st.sampled_from(KEYS), full=st.booleans())
    def talk(self, count: int, early: bool, key: str, full: bool = False) -> None:
        """Serve answers and post a rating of each, which may be read first; then a new leader may take over."""
        for n in range(count):
            if self.served < len(NAMES):
                self.serve(episode="", old=0, broken=0)
                name = NAMES[self.served - 1]
                item = Feedback(
                    id=f"f{name}", job="j", kind="metric", key_id=KEYS[n % 2] if early else key, received=self.now,
                    inference=name, metric="rating", value=float(n % 2),
                )  # fmt: skip
                self.world.feedback[len(self.world.feedback) + 1] = [item]
        if early:
            self.read_feedback(8)
        self.read_interactions(8)
        self.read_feedback(8)
        if full:
            self.stream_is_full(1.0)
            self.crash()
            self.read_interactions(8)
            self.read_feedback(8)
        self.decide()

    @rule(count=st.integers(1, 4))
    def read_interactions(self, count: int) -> None:
        for _ in range(count):
            if (record := self.world.interactions.get(self.cursor[0])) is not None:
                self.note(self.matching.on_interaction(self.cursor[0], record))
                self.cursor[0] += 1
        self.sweep(everything=False)

    @rule(count=st.integers(1, 4))
    def read_feedback(self, count: int) -> None:
        for _ in range(count):
            for item in self.world.feedback.get(self.cursor[1], []):
                self.note(self.matching.on_feedback(self.cursor[1], item, self.now))
            self.cursor[1] += self.cursor[1] in self.world.feedback
        self.sweep(everything=False)

    def sweep(self, *, everything: bool) -> None:
        state = self.run.state
        version = state.start_version(state.next_number)
        self.note(self.matching.sweep(version=version, newest=state.version, now=self.now, everything=everything))

    @rule(seconds=st.sampled_from([1.0, 16.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.sweep(everything=True)
        self.decide()

    @rule(share=st.sampled_from([0.5, 1.0]))
    def stream_is_full(self, share: float) -> None:
        """Reject undecided feedback in the older part of a full stream."""
        names = self.matching.undecided_feedback(int(share * self.cursor[1]))
        self.note(self.matching.reject(names, "feedback_full", self.now))
        self.record()
        self.world.rejected_for_space.update(names)

    @rule(count=st.integers(1, 3))
    def overload(self, count: int) -> None:
        """Reject the oldest episodes, and the feedback on them."""
        for name in list(self.matching.episodes)[:count]:
            self.world.rejected_for_space.update(turn.interaction.id for turn in self.matching.episodes[name].turns)
            statuses = self.matching._refuse(name, "too_many_waiting", self.now)
            self.world.rejected_for_space.update(one.feedback for one in statuses)
            self.note(statuses)
        self.record()

    @rule()
    def decide_now(self) -> None:
        self.decide()

    @rule()
    def crash(self) -> None:
        self.epoch += 1
        self.lead()

    @rule()
    def crash_after_the_append(self) -> None:
        """Crash after an append: the decision is durable, but none of its effects has happened."""
        self.append(self.run.decide(self.inputs), crash=True)
        self.crash()

    @precondition(lambda self: self.run.state.sealed)
    @rule(crash=st.sampled_from(["", "", "before", "after"]))
    def train(self, crash: str) -> None:
        batch = self.run.state.sealed[min(self.run.state.sealed)]
        version = batch.start_version + 1
        self.world.engine_version = max(self.world.engine_version, version)
        report = Report(
            kind="trained", epoch=1, batch=batch.number, revision=batch.revision, version=version, digest=f"w{version}",
            metrics=self.measured(),
        )  # fmt: skip
        if crash == "before":  # engines have the version before the ledger has it
            self.crash()
        if crash == "after":
            self.append(self.run.on_report(report, self.inputs), crash=True)
            self.crash()
        else:
            self.report(report)

    @rule()
    def fork(self) -> None:
        """Let a restarted trainer fork, as it cannot repeat a batch; its draws reopen with the same records."""
        state = self.run.state
        newest = -1 if state.checkpoint is None else state.checkpoint.number
        rolled_back = [number for number in state.batches if number > newest]
        if rolled_back:
            version = max(state.version, self.world.engine_version) + 1
            self.world.engine_version = version
            self.report(
                Report(
                    kind="forked", epoch=1, batch=min(rolled_back), version=version, digest=f"w{version}", reason="x"
                )
            )

    @rule()
    def checkpoint(self) -> None:
        state = self.run.state
        if state.last_trained not in state.checkpoints:
            self.report(
                Report(
                    kind="checkpointed", epoch=1, batch=state.last_trained, version=state.version, digest=state.digest,
                    path=f"ckpt-{state.last_trained}",
                )
            )  # fmt: skip

    # -- what must hold ----------------------------------------------------------------------------------------------

    def admissions(self) -> list[Admission]:
        events = [event for entry in self.world.entries for event in entry]
        return [one for event in events if isinstance(event, Admitted) for one in event.admissions]

    @invariant()
    def the_ledger_balances(self) -> None:
        assert self.run.state.balanced()
        assert not audit_ledger(self.world.entries, self.config).violations

    @invariant()
    def nothing_is_admitted_twice(self) -> None:
        for kind in ("interactions", "feedback"):
            counts = Counter(name for one in self.admissions() for name in getattr(one, kind))
            assert not [name for name, count in counts.items() if count > 1]

    @invariant()
    def rejected_items_stay_rejected(self) -> None:
        for one in self.admissions():
            assert self.world.rejected_for_space.isdisjoint([*one.interactions, *one.feedback])

    @invariant()
    def no_owner_exceeds_its_share(self) -> None:
        judges = {one.ordinal: one.judges for one in self.admissions()}
        for event in (event for entry in self.world.entries for event in entry):
            if isinstance(event, BatchSealed):
                keys = Counter(key for group in event.groups for key in judges[group.draw.ordinal])
                assert max(keys.values()) <= self.config.online.max_share_per_key * len(event.groups)

    def teardown(self) -> None:
        """Read everything, end the job, and check that the newest status of each item agrees with the ledger."""
        while self.cursor[0] in self.world.interactions:
            self.read_interactions(4)
        while self.cursor[1] in self.world.feedback:
            self.read_feedback(4)
        self.append(self.run.finish(self.inputs, {}))
        self.rebuild()
        newest = {one.feedback: one for one in self.world.statuses}
        ordinals = {name: one.ordinal for one in self.admissions() for name in one.feedback}
        lineage = audit_ledger(self.world.entries, self.config).trained
        trained = {group.draw.ordinal for batch in lineage.values() for group in batch.groups}
        drawn = {name: one.ordinal for one in self.admissions() for name in one.interactions}
        for record in self.world.interactions.values():  # never silently dropped
            end = self.world.decided[record.id]
            assert end.status != "admitted", "the job has ended"
            assert (end.status == "trained") == (drawn.get(record.id, -1) in trained), end
            assert end.status == "trained" or end.reason
        items = [item for items in self.world.feedback.values() for item in items]
        revised = {item.id: any(one.id == item.id and one.revision for one in items) for item in items}
        for item in items:
            found = newest[item.id]
            assert found.status in LAST
            assert found.status != "admitted", "the job has ended"
            if not revised[item.id]:  # a late revision has its own status
                assert (found.status == "trained") == (ordinals.get(item.id, -1) in trained), found


TestOnline = OnlineMachine.TestCase
TestOnline.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
