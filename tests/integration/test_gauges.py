"""Prometheus scrapes the metrics of a job while this process leads it."""

from __future__ import annotations

import asyncio
import contextlib

from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.shared.runtime import metrics
from penstock.shared.transport.bus import Bus


def scraped(job: str) -> dict[str, float]:
    """Return the values of a job's metrics by name."""
    head = f'penstock_job_metric{{job="{job}",metric="'
    lines = [line.removeprefix(head) for line in metrics.render().decode().splitlines() if line.startswith(head)]
    return {line.partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_the_newest_values_are_scraped_until_the_job_is_led_elsewhere(bus: Bus) -> None:
    outbox, other = Outbox(bus, JobStore(bus), "job_scraped"), Outbox(bus, JobStore(bus), "job_beside")
    other.metrics("train", 1, 1, {"reward/mean": 0.7}, batch=1)
    sending = asyncio.create_task(outbox.run())
    outbox.metrics("train", 1, 1, {"reward/mean": 0.25, "critic/value": 1.0}, batch=1)
    outbox.metrics("eval", 1, 1, {"eval/greedy": 0.5}, batch=1)
    outbox.metrics("train", 2, 2, {"reward/mean": 0.375, "optimizer/lr": 1e-4}, batch=2)
    assert scraped("job_scraped") == {"reward/mean": 0.375, "optimizer/lr": 1e-4, "eval/greedy": 0.5}
    await outbox.flush()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    assert scraped("job_scraped") == {}
    assert scraped("job_beside") == {"reward/mean": 0.7}
