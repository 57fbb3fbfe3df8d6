"""Rollout workers come and go while a job runs: they share its tickets, and a dead one's go to the others."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from penstock.shared.protocol.events import BatchSealed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

SECOND = "rollout-attached"


def test_two_workers_share_a_job_and_one_may_die(stack: Any) -> None:
    total = 80
    with stack.attached("penstock.services.rollout", SECOND) as second:
        job = stack.submit(f"train.max_updates={total}")

        def groups_of(worker: str) -> int:
            rows = {row["worker"]: row for row in stack.client.workers(job)}
            return int(rows.get(worker, {}).get("groups", 0))

        stack.until(lambda: groups_of(SECOND) and groups_of("rollout-0"), "both workers answered tickets", 30)
        second.send_signal(signal.SIGKILL)
        second.wait(5)
        assert stack.status(job).step < total - 5
    record = stack.finish(job)
    assert (record.status.phase, record.status.step) == ("succeeded", total)
    stack.check_books(job)
    batches = [event for event in stack.ledger(job) if isinstance(event, BatchSealed)]
    workers = [{group.worker for group in batch.groups} for batch in batches]
    assert set.union(*workers) == {"rollout-0", SECOND}
    assert workers[-1] == {"rollout-0"}
