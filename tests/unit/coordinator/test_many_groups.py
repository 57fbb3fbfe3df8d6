"""A leader decides on thousands of groups, and takes such jobs over, in milliseconds; its entries fit the ledger."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.services.coordinator.submission import plan_job
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.events import encode_events
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.trajectory import GroupHeader

NOW, GROUP = 1000.0, 8


def config(groups: int, max_lag: int, staleness: str = "wait") -> JobConfig:
    return JobConfig.parse(
        {
            "name": "many",
            "model": {"config": {}, "tokenizer": "char"},
            "data": {"train": {"type": "addition"}},
            "reward": {"scorers": [{"type": "exact"}]},
            "algorithm": {"group_size": GROUP},
            "sampling": {"max_new_tokens": 4},
            "limits": {"byte_budget": 1 << 40},
            "train": {
                "batch_size": groups * GROUP, "max_updates": 100_000, "max_lag": max_lag, "staleness": staleness,
            },
        }
    )  # fmt: skip


def header(draw: Draw, version: int = 0) -> GroupHeader:
    return GroupHeader(
        draw=draw, attempt="a" * 16, epoch=1, digest="d" * 32, nbytes=1000, prompt_tokens=2, lengths=[2] * GROUP,
        rewards=[1.0, 0.0] * (GROUP // 2), failed=[False] * GROUP, truncated=[False] * GROUP, finite=True,
        min_version=version, max_version=version, worker="rollout-0", temperature=1.0,
    )  # fmt: skip


def started(job: JobConfig) -> JobRun:
    run = JobRun(job, LedgerState(), num_ordinals=None, writer_epoch=1)
    run.commit(run.decide(Inputs(NOW)))
    run.commit(
        run.on_report(Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="p"), Inputs(NOW))
    )
    run.commit(run.decide(Inputs(NOW)))
    return run


@pytest.mark.parametrize("staleness", ["wait", "drop", "in_order"])
def test_nine_batches_of_2048_groups_are_sealed_in_milliseconds(staleness: str) -> None:
    """The limit is in CPU seconds, so that a loaded machine passes; quadratic work took 15."""
    run = started(config(2048, 8, staleness))
    for seq, draw in enumerate(sorted(run.state.open), 1):
        run.on_group(seq, header(draw))
    began = time.thread_time()
    while events := run.decide(Inputs(NOW)):
        assert len(encode_events(events)) <= MAX_INLINE_BYTES, "an entry of the ledger is one message"
        run.commit(events)
    assert time.thread_time() - began < 1.0
    sealed = run.state.sealed
    assert {number: len(batch.groups) for number, batch in sealed.items()} == dict.fromkeys(range(1, 10), 2048)


async def test_a_batch_too_large_for_a_ledger_entry_is_refused_at_submission(tmp_path: Path) -> None:
    settings = ServiceSettings(data_dir=tmp_path, experience_bytes=1 << 42)
    plan = await plan_job(config(4096, 0), [], settings, stores_parts=True)
    assert plan["batch"]["groups"] == 4096
    with pytest.raises(ConfigError, match=r"train.batch_size: 8192 groups of 8 completions are too many"):
        await plan_job(config(8192, 0), [], settings, stores_parts=True)


def run_after(updates: int, groups: int) -> tuple[JobRun, dict[int, GroupHeader]]:
    """Return a run after ``updates`` updates, and the headers of its groups by sequence number."""
    run, stored = started(config(groups, 0)), {}
    for number in range(1, updates + 1):
        for draw in run.state.in_flight:
            seq = len(stored) + 1
            stored[seq] = header(draw, number - 1)
            run.on_group(seq, stored[seq])
        run.commit(run.decide(Inputs(NOW)))
        batch = run.state.sealed[number]
        report = Report(
            kind="trained", epoch=1, batch=number, revision=batch.revision, version=number, digest=f"w{number}"
        )
        run.commit(run.on_report(report, Inputs(NOW)))
        run.commit(run.decide(Inputs(NOW)))
    return run, stored


@pytest.mark.long
def test_a_new_leader_looks_up_each_stored_group_once() -> None:
    run, stored = run_after(1750, 16)
    heir = JobRun(run.config, run.state, num_ordinals=None, writer_epoch=2)
    began = time.thread_time()
    for seq, one in stored.items():
        heir.on_group(seq, one)
    assert time.thread_time() - began < 3.0, "28,000 groups"
    assert heir.stored == run.stored
    assert heir.stored_bytes == run.stored_bytes == 28_000_000


def test_a_new_leader_reads_only_groups_after_the_trained_ones() -> None:
    run, stored = run_after(50, 16)
    for draw in run.state.in_flight[:4]:
        stored[len(stored) + 1] = header(draw, 50)
    heir = JobRun(run.config, run.state, num_ordinals=None, writer_epoch=2)
    first = heir.take_up()
    assert first == 801
    assert heir.stored == run.stored
    for seq, one in stored.items():
        if seq >= first:
            heir.on_group(seq, one)
    assert sorted(candidate.seq for candidate in heir.candidates.values()) == [801, 802, 803, 804]
    assert heir.stored_bytes == 804_000


def test_all_groups_are_read_if_the_ledger_does_not_record_their_sizes() -> None:
    run, _ = run_after(3, 2)
    old = fold([], run.state)
    for number, batch in old.batches.items():
        old.batches[number] = type(batch)(
            batch.draws, batch.seqs, batch.revision, batch.version, batch.digest, batch.values
        )
    heir = JobRun(run.config, old, num_ordinals=None, writer_epoch=2)
    assert heir.take_up() == 1
    assert not heir.stored
