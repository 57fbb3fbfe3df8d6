"""Rollout workers come and go while a job runs: they share its tickets, and a dead one's go to the others."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.protocol.events import BatchSealed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

SECOND = "rollout-attached"


@pytest.mark.long
def test_two_workers_share_a_job_and_one_may_die(stack: Any) -> None:
    total = 80
    with stack.attached("penstock.services.rollout", SECOND) as second:
        job = stack.submit(f"train.max_updates={total}")

        def groups_of(worker: str) -> int:
            rows = {row["worker"]: row for row in stack.client.workers(job)}
            return int(rows.get(worker, {}).get("groups", 0))

        stack.until(lambda: groups_of(SECOND) and groups_of("rollout-0"), "both workers answered tickets", 30)
        second.kill()
        second.wait(5)
        assert stack.status(job).step < total - 5
    record = stack.finish(job)
    assert (record.status.phase, record.status.step) == ("succeeded", total)
    stack.check_books(job)
    batches = [event for event in stack.ledger(job) if isinstance(event, BatchSealed)]
    workers = [{group.worker for group in batch.groups} for batch in batches]
    assert set.union(*workers) == {"rollout-0", SECOND}
    assert workers[-1] == {"rollout-0"}


@pytest.mark.long
def test_workers_are_started_and_drained_on_request(stack: Any) -> None:
    job = stack.submit("train.max_updates=60")
    result = stack.client.scale(job, "rollout", 2)
    assert result == {"replicas": 2, "ready": 2, "leaving": 0}
    assert "rollout-1" in stack.stack.processes
    stack.until(lambda: any(row["worker"] == "rollout-1" for row in stack.client.workers(job)), "the new worker works")
    told = stack.cli("scale", job, "rollout=1")
    assert told.exit_code == 0, told.output
    assert "rollout-1" not in stack.stack.processes
    assert not any("rollout-1" in text for text in stack.told), "who is let go is not started again"
    record = stack.finish(job)
    assert (record.status.phase, record.status.step) == ("succeeded", 60)
    stack.check_books(job)
    kinds = [(one.kind, one.state) for one in record.operations]
    assert kinds == [("scale", "succeeded")] * 2
