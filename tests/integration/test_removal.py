"""Deletion of a finished job: nothing of it is left, and it never returns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator import service as module
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.removal import STREAMS
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.service import CoordinatorService
from penstock.services.coordinator.services import Services, build_services
from penstock.services.coordinator.training.journal import Journal
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Conflict, NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import JobStarted
from penstock.shared.protocol.parts import part_subject
from penstock.shared.runtime.jobs import watch_jobs
from penstock.shared.transport.bus import Bus

SPEC: dict[str, Any] = {
    "name": "removed",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 1},
}
CONFIG = JobConfig.parse(SPEC)


@pytest.fixture
def services(bus: Bus, tmp_path: Path) -> Services:
    settings = ServiceSettings(data_dir=tmp_path)
    return build_services(bus, JobStore(bus), Members(), {}, settings)


async def leave_traces(bus: Bus, job: str) -> None:
    """Publish a message on every subject of a job, parts included, and store its keys."""
    for _, subject in STREAMS:
        if subject is subjects.ledger:
            journal = Journal(bus, job)
            await journal.load()
            await journal.append([JobStarted(writer_epoch=1, time=0.0, config_digest="c")])
        else:
            await bus.publish(subject(job).replace("*", "i1"), b"x")
    await bus.publish(part_subject(subjects.experience(job)), b"x")
    await bus.kv(subjects.POLICY).put(job, b"{}")
    for key in (job, subjects.candidate_manifest(job), subjects.base_manifest(job)):
        await bus.kv(subjects.MANIFESTS).put(key, b"m")


async def traces_of(bus: Bus, job: str) -> list[str]:
    streams = {stream for stream, _ in STREAMS}
    found = [subject for stream in sorted(streams) for subject in await bus.subject_counts(stream) if job in subject]
    found += [key for name in (subjects.POLICY, subjects.MANIFESTS) for key in await bus.kv(name).keys(job)]
    return found + [entry.id for entry in (await JobStore(bus).index()).all() if entry.id == job]


async def test_deleting_a_job_removes_all_of_it_and_nothing_of_other_jobs(
    bus: Bus, services: Services, tmp_path: Path
) -> None:
    jobs = [(await services.submissions.submit(CONFIG, SPEC)).id for _ in range(2)]
    for job in jobs:
        await leave_traces(bus, job)
        folder = tmp_path / "checkpoints" / job / "00000001-a"
        folder.mkdir(parents=True)
        (folder / "COMMIT").write_text("c")
        await services.jobs.set_status(job, phase="succeeded")
    gone, kept = jobs
    everything = await traces_of(bus, kept)
    assert len(everything) == len(STREAMS) + 6
    await services.steering.delete(gone, checkpoints=False)
    assert not await traces_of(bus, gone)
    assert (tmp_path / "checkpoints" / gone).is_dir()
    with pytest.raises(NotFound):
        await services.steering.delete(gone, checkpoints=True)
    assert await traces_of(bus, kept) == everything
    await services.steering.delete(kept, checkpoints=True)
    assert not (tmp_path / "checkpoints" / kept).exists()


async def test_a_running_job_and_its_initial_checkpoint_cannot_be_deleted(
    bus: Bus, services: Services, tmp_path: Path
) -> None:
    first = (await services.submissions.submit(CONFIG, SPEC)).id
    await leave_traces(bus, first)
    everything = await traces_of(bus, first)
    with pytest.raises(Conflict, match="is pending: only what has ended is deleted; cancel it first"):
        await services.steering.delete(first, checkpoints=True)
    assert await traces_of(bus, first) == everything
    await services.jobs.set_status(first, phase="failed")
    path = tmp_path / "checkpoints" / first / "00000001-a"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    second = await services.jobs.create(JobConfig.parse({**SPEC, "model": {"path": str(path), "tokenizer": "char"}}))
    with pytest.raises(Conflict, match=f"job '{second.id}', which runs, began with"):
        await services.steering.delete(first, checkpoints=True)
    assert await traces_of(bus, first) == everything
    await services.jobs.set_status(second.id, phase="succeeded")
    await services.steering.delete(first, checkpoints=True)
    assert not path.exists()


async def test_the_id_of_a_deleted_job_is_not_used_again(bus: Bus, services: Services) -> None:
    """NATS would take tickets of a new job with the same id for duplicates."""
    job = (await services.submissions.submit(CONFIG, SPEC, key="k")).id
    await services.jobs.set_status(job, phase="cancelled")
    await services.steering.delete(job, checkpoints=False)
    with pytest.raises(Conflict, match="was deleted; use a new Idempotency-Key"):
        await services.submissions.submit(CONFIG, SPEC, key="k")
    assert not (await services.jobs.index()).all()


@pytest.mark.long
async def test_a_job_that_is_deleted_while_its_leader_ends_is_not_led_again(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    service = CoordinatorService(bus, ServiceSettings(data_dir=tmp_path))
    job = (await service.store.create(CONFIG)).id
    await service.store.set_status(job, phase="succeeded")
    await asyncio.wait_for(service._run_job(job, 1), 30)
    await service.services.steering.delete(job, checkpoints=False)
    await asyncio.wait_for(service._run_job(job, 1), 30)
    assert not await bus.read(subjects.LEDGER, subjects.ledger(job)), "no new ledger begins"


async def test_a_worker_that_did_not_see_the_end_sees_the_deletion(bus: Bus) -> None:
    store, opened, ended = JobStore(bus), asyncio.Event(), list[str]()

    async def session(job: str, config: object) -> None:
        opened.set()
        await asyncio.Event().wait()

    watching = asyncio.create_task(watch_jobs(bus, session, on_end=ended.append))
    record = await store.create(CONFIG)
    await asyncio.wait_for(opened.wait(), 30)
    await store.delete(record.id)
    async with asyncio.timeout(30):
        while not ended:
            await asyncio.sleep(0.02)
    assert ended == [record.id]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
