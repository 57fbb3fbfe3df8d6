"""The state machine of live data with off-policy examples: the same invariants, the same crashes."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule

from penstock.services.coordinator.online.examples import InteractionRecord
from penstock.services.coordinator.online.groups import example_group, group_of
from penstock.services.coordinator.queries.admission_audit import replay_posted_admissions
from penstock.services.coordinator.training.decided import block_of_decision, episode_digest
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admitted, BatchSealed, Decided, Event
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Feedback
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.trajectory import Group, encode_group

spec = importlib.util.spec_from_file_location("online_machine", Path(__file__).with_name("test_online_machine.py"))
assert spec is not None
assert spec.loader is not None
machine = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = machine
spec.loader.exec_module(machine)


def job(*, max_lag: int, batch: int, share: float, assume: bool) -> OnlineJob:
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "machine", "model": {"config": {}, "tokenizer": "char"},
            "algorithm": {"type": "reinforce_pp", "baseline": {"keep": 0.5}},
            "sampling": {"max_new_tokens": 2}, "train": {"batch_size": batch, "max_lag": max_lag},
            "online": {
                "metrics": {"rating": {"type": "float"}}, "max_wait_s": 20.0, "match_ttl_s": 50.0, "idle_ttl_s": 40.0,
                "off_policy": {"supervised": {}, "preference": {}, "max_share": share},
                "posted": {"trusted_keys": ["a"], "assume_on_policy": assume},
            },
        }
    )  # fmt: skip


class OffPolicyMachine(machine.OnlineMachine):  # type: ignore[misc, name-defined]
    @initialize(
        max_lag=st.integers(0, 2), batch=st.integers(2, 4), share=st.sampled_from([0.25, 1.0]), assume=st.booleans()
    )
    def begin(self, **choices: Any) -> None:
        self.config, self.world = job(**choices), machine.World()
        self.now, self.epoch, self.served = 1000.0, 1, 0
        self.lead()
        self.report(Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="ckpt-0"))

    def publish(self, draws: list[Draw]) -> None:
        for draw in draws:
            _, header = encode_group(self.group(draw))
            self.world.num_groups += 1
            self.world.stored[self.world.num_groups] = header
            self.run.on_group(self.world.num_groups, header)

    def group(self, draw: Draw) -> Group:
        admission = self.run.state.admissions[draw.ordinal]
        turns = [self.world.interactions[seq] for seq in admission.interactions.values()]
        if turns:
            return group_of("j", draw, turns, reward=admission.reward, epoch=self.epoch, objective=admission.objective)
        answers = [self.world.interactions[seq].token_ids for seq in admission.context.values()] or [[2]]
        answers = answers if admission.objective == "preference" else answers[:1]
        return example_group(
            "j", draw, [1], answers, objective=admission.objective, reward=admission.reward, epoch=self.epoch,
            version=admission.version, assumed=admission.reason == "assumed",
        )  # fmt: skip

    @rule(
        number=st.integers(0, 20),
        back=st.integers(0, 5),
        key=st.sampled_from(machine.KEYS),
        revision=st.integers(0, 1),
        kind=st.sampled_from(["correction", "preference", "interaction"]),
        age=st.integers(-1, 3),
        complete=st.booleans(),
        turn=st.integers(-2, 3),
    )
    def post_example(
        self, *, number: int, back: int, key: str, revision: int, kind: Any, age: int, complete: bool, turn: int
    ) -> None:
        """Post an example; it may be about a missing answer, revise another example, or have an untrusted key."""
        last = len(machine.NAMES) - 1
        one, other = (machine.NAMES[max(0, min(last, self.served - back - n))] for n in (0, 1))
        bodies: dict[str, dict[str, Any]] = {
            "correction": {"corrected": {"content": "x"}},
            "preference": {"chosen": one, "rejected": other, "strength": 0.5},
            "interaction": {"prompt_token_ids": [1], "token_ids": [2], "rewards": {"rating": 0.5}},
        }
        if kind == "interaction" and age >= 0:
            bodies[kind] |= {"policy_version": max(0, self.world.engine_version - age)}
        if kind == "interaction" and complete:
            bodies[kind] |= {"logprobs": [-0.5]}
        episode: dict[str, Any] = {}
        if kind == "interaction" and turn >= -1:
            episode = {"episode": machine.EPISODES[number % 2], "turn": turn, "final": turn >= 2}
            bodies[kind] |= {"prompt_token_ids": [1, *[2, 3] * max(0, turn - number % 2)]}
        item = Feedback(
            id=f"m{number}", job="j", kind=kind, key_id=key, received=self.now, revision=revision,
            inference="" if kind == "interaction" else one, body=bodies[kind], **episode,
        )  # fmt: skip
        self.world.feedback[len(self.world.feedback) + 1] = [item]

    @rule(count=st.integers(1, 4))
    def read_feedback(self, count: int) -> None:
        for _ in range(count):
            for item in self.world.feedback.get(self.cursor[1], []):
                self.find_records(item)
                self.note(self.matching.on_feedback(self.cursor[1], item, self.now))
            self.cursor[1] += self.cursor[1] in self.world.feedback
        self.sweep(everything=False)

    def find_records(self, item: Feedback) -> None:
        """Look up missing records by name, as the supply of the leader does, however long ago they were read."""
        examples = self.matching.examples
        for name in examples.missing_records(item) if examples.accepts(item) else []:
            for seq, record in self.world.interactions.items():
                if record.id == name:
                    examples.add_record(name, InteractionRecord.of(seq, record))

    def append(self, events: list[Event], *, crash: bool = False) -> None:
        """Append events, and check that no posted episode is admitted which a leader already decided."""
        self.record()
        closed = {
            digest
            for event in (event for entry in self.world.entries for event in entry)
            if isinstance(event, Decided)
            for digest in block_of_decision(event).closed
        }
        admitted = [one for event in events if isinstance(event, Admitted) for one in event.admissions]
        posted = {episode_digest(one.origin[0]) for one in admitted if one.origin and not one.interactions}
        assert posted.isdisjoint(closed)
        super().append(events, crash=crash)

    @invariant()
    def a_replay_decides_posted_turns_the_same(self) -> None:
        for entry in self.world.entries:
            for event in (event for event in entry if isinstance(event, Admitted)):
                assert not replay_posted_admissions(event.admissions, self.world.feedback, self.config)[1]

    @invariant()
    def only_the_policy_loss_knows_a_lag_and_others_have_their_share(self) -> None:
        config = self.config
        known = {one.ordinal: one for one in self.admissions()}
        for event in (event for entry in self.world.entries for event in entry):
            if not isinstance(event, BatchSealed):
                continue
            kinds = Counter(group.objective for group in event.groups)
            assert kinds.total() - kinds["policy"] <= max(
                1, int(config.online.off_policy.max_share * config.train.batch_size)
            )
            assert kinds["policy"] <= config.train.batch_size
            for group in event.groups:
                assert group.objective == known[group.draw.ordinal].objective
                late = event.start_version - group.min_version > config.train.max_lag
                assert not (late and group.objective == "policy")
                assert (group.baseline is not None) == (group.objective == "policy")
            assumed = [g for g in event.groups if known[g.draw.ordinal].reason == "assumed"]
            assert len(assumed) <= config.train.batch_size / 4


TestOffPolicy = OffPolicyMachine.TestCase
TestOffPolicy.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
