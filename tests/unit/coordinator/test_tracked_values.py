"""Tracked values of buckets: computed with each batch, from the ledger alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.coordinator.online.source import baselines_of, bucket_of, flaws_of_baselines
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.snapshot import decode_snapshot, encode_snapshot
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchRefused,
    BatchSealed,
    BatchTrained,
    Drawn,
    Event,
    LineageForked,
    SealedGroup,
    decode_events,
    encode_events,
)
from penstock.shared.protocol.ids import Draw

BASELINE = {"tag": "task", "buckets": ["code", "chat"], "keep": 0.5, "value": 0.0, "weight": 2.0}


def job(**baseline: Any) -> OnlineJob:
    spec = {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"}, "train": {"batch_size": 4},
        "algorithm": {"type": "reinforce_pp", "baseline": BASELINE | baseline},
    }  # fmt: skip
    return OnlineJob.parse(spec)


class Ledger:
    """A ledger that a test writes event by event."""

    def __init__(self, config: OnlineJob) -> None:
        self.config, self.state, self.events = config, LedgerState(), list[Event]()

    def add(self, event: Event) -> None:
        self.state.apply(event)
        self.events.append(event)

    def admit(self, *rewards: tuple[str, float]) -> list[Draw]:
        first = self.state.next_ordinal
        stop = first + len(rewards)
        self.add(Drawn(writer_epoch=1, time=0, start=first, stop=stop, min_version=0, deadline=0))
        admissions = [
            Admission(n, {f"i{n}": n + 1}, {}, reward, 0, "k", "u", "feedback", 0, bucket=bucket)
            for n, (bucket, reward) in enumerate(rewards, first)
        ]
        self.add(Admitted(writer_epoch=1, time=0, admissions=admissions, low_interactions=stop + 1, low_feedback=1))
        return [Draw(n) for n in range(first, stop)]

    def seal(self, draws: list[Draw]) -> dict[Draw, float]:
        state, number = self.state, self.state.next_number
        baselines, tracking = baselines_of(self.config, state, draws)
        groups = [
            SealedGroup(draw, "a", draw.ordinal + 1, "d", 0, 0, [0.0], 1, "w", baseline=baselines.get(draw))
            for draw in draws
        ]
        sealed = BatchSealed(
            writer_epoch=1, time=0, number=number, revision=state.revisions.get(number, 0) + 1,
            start_version=state.start_version(number), update_index=state.update_index(number), groups=groups,
            tracking=tracking,
        )  # fmt: skip
        assert flaws_of_baselines(self.config, state, sealed) == []
        self.add(sealed)
        return baselines

    def train(self, number: int) -> None:
        batch = self.state.sealed[number]
        version = batch.start_version + 1
        self.add(
            BatchTrained(
                writer_epoch=1, time=0, number=number, revision=batch.revision, version=version, digest="d",
                trainer_epoch=1,
            )
        )  # fmt: skip


def test_a_bucket_uses_its_own_past_and_a_new_one_that_of_all() -> None:
    ledger = Ledger(job())
    first = ledger.seal(ledger.admit(("code", 1.0), ("code", 1.0), ("", -1.0)))
    assert set(first.values()) == {0.0}, "no value is tracked yet"
    ledger.train(1)
    second = ledger.seal(ledger.admit(("code", 0.0), ("chat", 0.0), ("", 0.0)))
    everything = (1.0 + 2 * 0.0) / (3 + 2)
    assert list(second.values()) == pytest.approx([(2.0 + 2 * everything) / 4, everything, everything])


def test_a_batch_sealed_ahead_counts_the_one_before_it_once() -> None:
    ledger = Ledger(job())
    one, two = ledger.admit(("code", 1.0), ("code", 1.0)), ledger.admit(("code", 0.0))
    ledger.seal(one)
    assert ledger.seal(two)[two[0]] > 0
    ledger.add(
        BatchRefused(
            writer_epoch=1, time=0, number=2, revision=1, bad=[], reason="r", redraw=False, min_version=0, deadline=0
        )
    )
    assert ledger.seal(two)[two[0]] > 0
    ledger.train(1)
    ledger.train(2)
    assert ledger.state.values["code"] == (0.5 * 2.0, 0.5 * 2 + 1)


def test_a_refused_batch_leaves_no_trace_in_later_values() -> None:
    ledger, apart = Ledger(job()), Ledger(job())
    one, two = ledger.admit(("code", 1.0), ("code", 1.0)), ledger.admit(("code", -1.0))
    ledger.seal(one)
    ledger.seal(two)
    ledger.add(
        BatchRefused(
            writer_epoch=1, time=0, number=1, revision=1, bad=one[:1], reason="r", redraw=False, min_version=0,
            deadline=0,
        )
    )  # fmt: skip
    ledger.seal(one[1:])
    ledger.train(1)
    ledger.train(2)
    for number, rewards in enumerate([("code", 1.0), ("code", -1.0)], 1):
        apart.seal(apart.admit(rewards))
        apart.train(number)
    assert ledger.state.values == apart.state.values


def test_a_fork_removes_the_rewards_of_rolled_back_batches() -> None:
    ledger = Ledger(job())
    for reward in (1.0, -1.0):
        ledger.seal(ledger.admit(("code", reward), ("chat", reward)))
        ledger.train(ledger.state.next_number - 1)
    after_one = Ledger(job())
    after_one.seal(after_one.admit(("code", 1.0), ("chat", 1.0)))
    after_one.train(1)
    ledger.add(
        LineageForked(
            writer_epoch=1, time=0, from_batch=2, version=9, digest="d", reason="r", trainer_epoch=1, min_version=0,
            deadline=0,
        )
    )  # fmt: skip
    assert ledger.state.values == after_one.state.values


@settings(max_examples=25)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["", "code", "chat"]), st.floats(-1, 1)), min_size=1, max_size=4),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_every_leader_and_every_audit_finds_the_same_values(batches: list[list[tuple[str, float]]]) -> None:
    ledger = Ledger(job())
    for rewards in batches:
        baselines = ledger.seal(ledger.admit(*rewards))
        assert all(-1 <= value <= 1 for value in baselines.values())
        ledger.train(ledger.state.next_number - 1)
    again = fold(decode_events(encode_events(ledger.events)))
    assert again == ledger.state
    _, state = decode_snapshot(encode_snapshot(ledger.state, job="j", seq=1, entry="e"), job="j")
    assert state.values == ledger.state.values


def test_undeclared_kinds_share_one_bucket() -> None:
    assert bucket_of(job(), {"task": "code"}) == "code"
    assert bucket_of(job(), {"task": "poetry"}) == ""
    assert bucket_of(job(tag=None, buckets=[]), {"task": "code"}) == ""
    with pytest.raises(ConfigError, match="give both, or neither"):
        job(buckets=[])


def test_only_online_jobs_track_values() -> None:
    spec = {
        "name": "tiny", "model": {"config": {}, "tokenizer": "char"}, "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]}, "algorithm": {"type": "reinforce_pp", "baseline": {}},
        "train": {"batch_size": 4, "max_updates": 1},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="online_rl"):
        JobConfig.parse(spec)
