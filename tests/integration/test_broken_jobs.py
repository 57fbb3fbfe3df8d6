"""A job that no leader can lead fails with the reason, and does not stay without a leader."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.services.coordinator import service as module
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.service import CoordinatorService
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.transport.bus import Bus


async def test_a_job_file_of_another_release_fails_with_the_reason(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    record = JobRecord(id="job_old", name="old", created_at=datetime.now(UTC), spec={"name": "old", "gone": 1})
    await bus.kv(subjects.JOBS).put(record.id, record.model_dump_json().encode())
    service = CoordinatorService(bus, ServiceSettings(data_dir=tmp_path))
    await asyncio.wait_for(service._run_job(record.id, 1), 60)
    status = (await JobStore(bus).get(record.id)).status
    assert status.phase == "failed"
    assert status.finished_at is not None
    assert "internal error: " in status.message
    assert "gone" in status.message
