"""A wrong clock of a host is shown in the status, and reported in one event."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time, clock_skew_s
from penstock.shared.protocol.jobs import Condition, JobRecord
from penstock.shared.protocol.messages import Heartbeat
from penstock.shared.transport.bus import Bus

JOB = "job_clocks"
SPEC: dict[str, Any] = {
    "name": "addition",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 4},
    "sampling": {"max_new_tokens": 4},
    "train": {"batch_size": 8, "max_updates": 3},
}


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -130.0])
async def test_a_process_measures_how_far_its_clock_is_ahead(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    assert await bus.measure_clock() == pytest.approx(ahead_s, abs=2)
    assert clock_skew_s() == pytest.approx(ahead_s, abs=2)
    assert bus_time() == pytest.approx(real(), abs=2)
    seq = await bus.publish(subjects.metrics(JOB), b"x")
    stored = (await bus.get(subjects.METRICS, seq)).time
    assert stored == pytest.approx(bus_time(), abs=2), "messages are stamped with the same clock"


def beat(members: Members, worker: str, skew_s: float | None) -> None:
    sign = Heartbeat(
        service="rollout", worker=worker, host="h", pid=1, started=0.0, interval_s=60.0, health_port=0, ready=True,
        jobs={}, clock_skew_s=skew_s,
    )  # fmt: skip
    members.on_heartbeat(sign, time.monotonic())


@pytest.mark.long
async def test_a_wrong_clock_is_a_condition_and_an_event(bus: Bus) -> None:
    record = JobRecord(id=JOB, name=JOB, created_at=datetime.now(UTC), spec=SPEC)
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
    members = Members()
    runner = JobRunner(bus, JobStore(bus), members, record, epoch=1, data_dir=Path("/nonexistent"))

    def clocks() -> Condition:
        return next(one for one in runner._known if one.type == "ClocksAgree")

    async def until(status: str) -> None:
        async with asyncio.timeout(30):
            while not (runner.ready and runner._known and clocks().status == status):
                assert not leading.done(), leading.exception()
                await asyncio.sleep(0.02)

    leading = asyncio.create_task(runner.lead())
    try:
        await until("Unknown")
        beat(members, "rollout-0", 0.4)
        await until("True")
        beat(members, "rollout-0", 130.0)
        await until("False")
        assert clocks().message == "clocks of hosts differ from that of NATS: rollout-0 +130.0 s"
        assert [row["clock_skew_s"] for row in members.rows(JOB, time.monotonic())] == [130.0]
        beat(members, "rollout-0", 0.0)
        await until("True")
        await runner.outbox.flush()
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
    rows = [json.loads(message.data) for message in await bus.read(subjects.EVENTS, subjects.events(JOB))]
    assert [(row["level"], row["message"]) for row in rows if row["type"] == "clock_skew"] == [
        ("warning", "clocks of hosts differ from that of NATS: rollout-0 +130.0 s"),
        ("info", "the clocks of all hosts agree again"),
    ]
