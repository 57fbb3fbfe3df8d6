"""A process that serves one short job after another keeps no memory of ended jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.reward.service import RewardService
from penstock.services.rollout.service import RolloutService
from penstock.services.trainer.service import TrainerService
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.transport.bus import Bus

SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        "tokenizer": "char",
    },
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 2},
    "sampling": {"max_new_tokens": 4},
    "train": {"batch_size": 4, "max_updates": 2, "max_lag": 1},
}


def held(shm: Path) -> tuple[int, int]:
    """Return how many weight slots this process maps, removed ones included, and how many files are in ``shm``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("penstock-weights" in line for line in lines), len(list(shm.iterdir()))


async def until(holds: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.05)
    assert holds(), what


@pytest.mark.slow
@pytest.mark.long
async def test_weights_of_ended_jobs_are_freed(bus: Bus, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=shm, worker_id="w")
    services = [TrainerService(bus, settings), RolloutService(bus, settings), RewardService(bus, settings)]
    running = [asyncio.create_task(service.run()) for service in services]
    await until(lambda: all(service.ready for service in services), "the services to be ready")
    try:
        for number in range(2):
            job = f"job_{number:032x}"
            record = JobRecord(id=job, name=job, created_at=datetime.now(UTC), spec=SPEC)
            await bus.kv(subjects.JOBS).put(job, record.model_dump_json().encode())
            runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=1, data_dir=tmp_path)
            async with asyncio.timeout(60):
                await runner.lead()
            assert runner.run.state.finished == "succeeded"
            del runner
            await until(lambda: not any(service.sessions for service in services), "the sessions to end")
            await until(lambda: held(shm) == (0, 0), "the weights to be given back")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
