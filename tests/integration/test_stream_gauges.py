"""Gauges for Prometheus: fill levels of streams, and versions of services."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from penstock.services.coordinator.jobs.gauges import StreamGauges
from penstock.services.coordinator.jobs.members import Members
from penstock.shared.protocol import subjects
from penstock.shared.protocol.messages import Heartbeat
from penstock.shared.runtime import metrics
from penstock.shared.transport.bus import Bus


def beat(service: str, worker: str, **versions: int) -> Heartbeat:
    jobs: dict[str, dict[str, Any]] = {f"job_{name}": {"version": version} for name, version in versions.items()}
    return Heartbeat(
        service=service, worker=worker, host="h", pid=1, started=0.0, interval_s=60.0, health_port=0, ready=True,
        jobs={**jobs, "job_idle": {"version": None}},
    )  # fmt: skip


def shown(name: str) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(f"penstock_{name}{{")]
    return {line.partition("{")[2].partition("}")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_gauges_are_shown_and_outdated_ones_removed(bus: Bus) -> None:
    members, now = Members(), time.monotonic()
    for one in (beat("rollout", "r0", a=5, b=1), beat("rollout", "r1", a=3), beat("trainer", "t0", a=6)):
        members.on_heartbeat(one, now)
    for count in range(3):
        await bus.publish(subjects.dead("job_a"), b"x", msg_id=str(count))
    gauges = StreamGauges(bus, members)
    looking = asyncio.create_task(gauges.run())
    async with asyncio.timeout(30):
        while 'job="job_a",service="trainer"' not in shown("policy_version"):
            await asyncio.sleep(0.01)
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    assert shown("queue_messages")['stream="dead"'] == 3
    assert 0 < shown("queue_filled_ratio")['stream="dead"'] < 1
    assert shown("policy_version") == {
        'job="job_a",service="rollout"': 3, 'job="job_b",service="rollout"': 1, 'job="job_a",service="trainer"': 6,
    }  # fmt: skip
    gauges._show({("job_a", "rollout"): 7})
    assert shown("policy_version") == {'job="job_a",service="rollout"': 7}
