"""Streams that are full: a job's own byte budget, a budget that is too small, and a stream full of other messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import ConfigError, NotFound, PenstockError, StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import BatchSealed, Checkpointed, Dropped
from penstock.shared.transport.bus import Bus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]


def smallest_budget(job: dict[str, Any]) -> int:
    config = JobConfig.parse(job)
    return 2 * (config.train.max_lag + 2) * config.groups_per_batch * config.max_group_bytes


@pytest.mark.long
def test_checkpoints_keep_a_job_within_a_small_budget(stack: Any, make_job: Callable[..., Any]) -> None:
    changes = ["train.max_updates=80", "checkpoint.every=1000"]
    budget = smallest_budget(make_job(*changes))
    job = stack.submit(*changes, f"limits.byte_budget={budget}")
    assert stack.finish(job).status.step == 80
    stack.check_audit(job)

    events = stack.ledger(job)
    checkpoints = [event for event in events if isinstance(event, Checkpointed)]
    forced = [event for event in checkpoints if 0 < event.number < 80]
    assert len(forced) >= 3, "the interval alone asks for none"
    rows = [row["message"] for row in stack.client.events(job, follow=False) if row["type"] == "checkpoint"]
    assert [f"checkpoint after update {event.number} ({event.reason}) at {event.path}" for event in checkpoints] == rows

    remaining = stack.groups(job)
    assert min(remaining, default=1 << 62) >= max(event.low_seq for event in checkpoints)
    sealed = [group.seq for event in events if isinstance(event, BatchSealed) for group in event.groups]
    assert sum(seq in remaining for seq in sealed) < len(sealed) / 2
    stored = stack.on_bus(lambda bus: bus.read(subjects.EXPERIENCE, subjects.experience(job)))
    assert sum(len(message.data) for message in stored) <= budget
    stack.check_replay(job, at_least=0)


def test_batches_that_can_never_fit_are_refused(stack: Any, make_job: Callable[..., Any]) -> None:
    budget = smallest_budget(make_job())
    with pytest.raises(ConfigError, match=rf"need {budget // 2} bytes .* raise it to at least {budget}"):
        stack.submit(f"limits.byte_budget={budget - 2}")
    stack.client.dry_run(make_job(f"limits.byte_budget={budget}"))


async def fill(bus: Bus, junk: str) -> None:
    for nbytes in (1 << 20, 1 << 16, 1 << 10, 1):
        with contextlib.suppress(StreamFull):
            while True:
                await bus.publish(junk, b"x" * nbytes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (subjects.EXPERIENCE, "stream EXPERIENCE is full"),
        (subjects.LEDGER, "the bus, for an entry of the ledger (stream LEDGER is full"),
    ],
    ids=[subjects.EXPERIENCE, subjects.LEDGER],
)
def test_a_job_waits_while_a_stream_is_full(stack: Any, make_job: Callable[..., Any], stream: str, reason: str) -> None:
    total, junk = 60, f"{stream.lower()}.junk"
    try:
        if stream == subjects.EXPERIENCE:  # otherwise a fast job ends before the stream is full
            stack.on_bus(lambda bus: fill(bus, junk))
        job = stack.submit(f"train.max_updates={total}")
        if stream == subjects.LEDGER:  # a full ledger refuses every new job
            stack.reach(job, 3)
            stack.on_bus(lambda bus: fill(bus, junk))

        def ages() -> list[float]:
            stack.on_bus(lambda bus: fill(bus, junk))  # earlier jobs may still give room back
            return [row["age_s"] for row in stack.client.why(job) if reason in row["waiting_for"]]

        stack.until(lambda: max(ages(), default=0.0) > 1.0, f"'{reason}' ages", 20, lambda: stack.client.why(job))
        held = stack.status(job).step
        assert held < total
        if stream == subjects.LEDGER:
            with pytest.raises(PenstockError, match=r"LEDGER is 100% full .* delete finished jobs"):
                stack.client.submit(make_job())
    finally:
        stack.on_bus(lambda bus: bus.purge(stream, junk))
    assert stack.finish(job).status.step == total
    stack.check_audit(job)
    assert not [event for event in stack.ledger(job) if isinstance(event, Dropped)], "back-pressure costs no draw"


def test_a_finished_job_is_deleted(stack: Any) -> None:
    job = stack.submit("train.max_updates=2")
    refused = stack.cli("rm", job, "--yes")
    assert refused.exit_code == 1
    assert "only what has ended is deleted" in refused.stderr
    stack.finish(job)
    folder = stack.directory / "data" / "checkpoints" / job
    assert folder.is_dir()
    assert stack.cli("rm", job, "--checkpoints", "--yes").exit_code == 0
    with pytest.raises(NotFound):
        stack.client.get(job)
    assert not stack.ledger(job)
    assert not stack.groups(job)
    assert not folder.exists()
