"""A job's record contains its leader's heartbeat and the reason of a failure, on a real bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader import outbox as outbox_module
from penstock.services.coordinator.leader import runner as runner_module
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.service import CoordinatorService
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import Event
from penstock.shared.protocol.jobs import JobFailure, JobRecord
from penstock.shared.protocol.messages import Heartbeat, Report
from penstock.shared.runtime.tasks import end_tasks
from penstock.shared.transport.bus import Bus
from tests.unit.trainer.episode_batches import job_of

JOB = JobConfig.parse(
    {
        "name": "job_s", "model": {"config": {}, "tokenizer": "char"}, "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]}, "algorithm": {"group_size": 2}, "train": {"max_updates": 3},
    }
)  # fmt: skip
NO_ROOM = JobFailure(code="trainer_failed", message="trainer: no room", service="trainer")


@asynccontextmanager
async def led(bus: Bus, record: JobRecord, epoch: int) -> AsyncIterator[asyncio.Task[None]]:
    """Lead the job until it ends; leaving the block kills the leader."""
    runner = JobRunner(bus, JobStore(bus), Members(), record, epoch=epoch, data_dir=Path("/nonexistent"))
    leading = asyncio.create_task(runner.lead())
    try:
        async with asyncio.timeout(30):
            while not runner.ready and not leading.done():
                await asyncio.sleep(0.02)
            while (await JobStore(bus).get(record.id)).status.heartbeat_at is None:
                await asyncio.sleep(0.02)
        yield leading
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


async def fail(bus: Bus, job: str) -> None:
    """Report a failure, as a trainer does that cannot continue."""
    await bus.request(
        subjects.report(job), pack(Report(kind="failed", epoch=1, reason="no room"), job=job), deadline_s=10
    )


async def test_each_leader_is_an_attempt_and_the_last_one_records_the_failure(bus: Bus) -> None:
    store = JobStore(bus)
    record = await store.create(JOB)
    assert (record.status.attempt, record.status.heartbeat_at, record.status.error) == (0, None, None)
    async with led(bus, record, 1):
        first = (await store.get(record.id)).status
        assert (first.attempt, first.error) == (1, None)
    async with led(bus, await store.get(record.id), 2) as leading:
        await fail(bus, record.id)
        await asyncio.wait_for(leading, 30)
    status = (await store.get(record.id)).status
    assert (status.phase, status.message, status.attempt) == ("failed", NO_ROOM.message, 2)
    assert status.error == NO_ROOM
    assert first.heartbeat_at is not None
    assert status.heartbeat_at is not None
    assert status.heartbeat_at > first.heartbeat_at


async def test_the_next_leader_records_a_failure_that_the_last_one_did_not(bus: Bus) -> None:
    """Only the ledger contains the failure; the record does not."""
    store = JobStore(bus)
    record = await store.create(JOB)
    journal = Journal(bus, record.id)
    run = JobRun(JOB, await journal.load(), num_ordinals=None, row_bytes=1, writer_epoch=1)
    for failure in (None, NO_ROOM):
        if failure is not None:
            run.fail(failure)
        events = run.decide(Inputs(0.0))
        await journal.append(events)
        run.commit(events)
    assert run.state.finished == "failed"
    async with led(bus, record, 2) as leading:
        await asyncio.wait_for(leading, 30)
    status = (await store.get(record.id)).status
    assert (status.phase, status.message, status.error) == ("failed", NO_ROOM.message, NO_ROOM)


@pytest.mark.parametrize("kind", ["rl", "evaluation"])
async def test_invalid_data_is_distinguished_from_a_defect(bus: Bus, tmp_path: Path, kind: str) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    store, rows = JobStore(bus), {"type": "file", "path": str(tmp_path / "rows.jsonl")}
    spec = JOB.model_dump(exclude_unset=True) | {"data": {"train": rows}}
    if kind == "evaluation":
        spec = {name: spec[name] for name in ("name", "model", "reward")} | {"kind": kind, "data": {"eval": rows}}
    record = await store.create(parse_job(spec))
    service = CoordinatorService(bus, ServiceSettings(data_dir=tmp_path, worker_id="c", open_loopback=True))
    await asyncio.wait_for(service._lead_job(record.id, 1), 30)
    status = (await store.get(record.id)).status
    assert status.error is not None
    assert (status.phase, status.error.code, status.error.service) == ("failed", "invalid_data", None)
    assert "rows.jsonl" in status.message == status.error.message
    assert status.finished_at is not None
    events = [msgspec.json.decode(m.data) for m in await bus.read(subjects.EVENTS, subjects.events(record.id))]
    assert [(event["level"], event["message"]) for event in events] == [("error", f"failed: {status.message}")]


@pytest.fixture
def check_times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """List of the times at which leaders checked if there is something to decide."""
    found, decide = list[float](), JobRun.decide

    def counted(self: JobRun, inputs: Inputs, after: Sequence[Event] = ()) -> list[Event]:
        found.append(asyncio.get_running_loop().time())
        return decide(self, inputs, after)

    monkeypatch.setattr(JobRun, "decide", counted)
    return found


@pytest.mark.long
async def test_an_idle_job_is_checked_ever_more_rarely(bus: Bus, check_times: list[float]) -> None:
    """A coordinator may lead hundreds of jobs without workers."""
    store = JobStore(bus)
    record = await store.create(JOB)
    async with led(bus, record, 1):
        before, begun, clock = (await store.get(record.id)).revision, len(check_times), asyncio.get_running_loop().time
        end = clock() + 6.0
        while clock() < end:
            await asyncio.sleep(0.1)
        assert len(check_times) - begun <= 12, "each pause is twice as long as the one before, up to two seconds"
        assert (await store.get(record.id)).revision <= before + 2, "an unchanged record is not written"


def beat_of(worker: str) -> Heartbeat:
    facts: dict[str, Any] = {"host": "h", "pid": 1, "started": 0.0, "interval_s": 60.0, "health_port": 0, "jobs": {}}
    return Heartbeat(service="trainer", worker=worker, ready=True, **facts)


@pytest.mark.long
async def test_an_idle_leader_reacts_at_once_to_every_message(
    bus: Bus, tmp_path: Path, check_times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader reacts to a heartbeat, a report and a request; no check without a message is due in this test."""
    for name in ("TICK_S", "IDLE_S"):
        monkeypatch.setattr(runner_module, name, 3600.0)
    service = CoordinatorService(bus, ServiceSettings(data_dir=tmp_path, worker_id="c", open_loopback=True))
    record = await service.store.create(JOB)
    hearing = asyncio.create_task(service._hear_heartbeats())
    leading = asyncio.create_task(service._run_job(record.id, 1))
    try:
        async with asyncio.timeout(60):
            while record.id not in service.runners or not service.runners[record.id].ready:
                await asyncio.sleep(0.02)
            (runner,) = service.runners.values()
            for worker in ("first", "second"):
                begun, data = len(check_times), pack(beat_of(worker))
                while len(check_times) == begun:
                    await bus.notify(subjects.heartbeat("trainer", worker), data)
                    await asyncio.sleep(0.1)
            first = Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="p")
            await bus.request(subjects.report(record.id), pack(first, job=record.id), deadline_s=30)
            while not (await bus.stream_state(subjects.TICKETS)).messages:
                await asyncio.sleep(0.02)
            runner.update_record(await service.store.set_desired(record.id, "cancelled", force=True))
            await leading
    finally:
        await end_tasks([hearing, leading])
    assert (await service.store.get(record.id)).status.phase == "cancelled"


async def test_an_idle_leader_still_writes_heartbeats(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(bus)
    record = await store.create(JOB)

    async def beats(number: int, within_s: float) -> int:
        """Return how many heartbeats were written to the record within that time, at most ``number``."""
        seen = {(await store.get(record.id)).status.heartbeat_at}
        end = asyncio.get_running_loop().time() + within_s
        while len(seen) <= number and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
            seen.add((await store.get(record.id)).status.heartbeat_at)
        return len(seen) - 1

    outbox = Outbox(bus, store, record.id, attempt=1)
    monkeypatch.setattr(outbox_module, "STATUS_EVERY_S", 0.05)
    sending = asyncio.create_task(outbox.run())
    try:
        outbox.status({"phase": "running", "message": ""})
        assert await beats(1, 10) == 1
        assert await beats(1, 0.5) == 0, "nothing changed, and it is not due yet"
        monkeypatch.setattr(outbox_module, "HEARTBEAT_S", 0.1)
        outbox.status({"phase": "running", "message": ""})  # as at the leader's next check
        assert await beats(2, 10) == 2
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_job_whose_simulator_is_gone_since_its_submission_fails_with_the_reason(bus: Bus) -> None:
    async def describe(_: bytes) -> bytes:
        raise ConfigError("environment.task: no task 'Reach'")

    store = JobStore(bus)
    record = await store.create(job_of())
    runner = JobRunner(bus, store, Members(), record, epoch=1, data_dir=Path("/nonexistent"))
    async with await bus.serve(subjects.ENV_DESCRIBE, describe):
        await asyncio.wait_for(runner.lead(), 30)
    status = (await store.get(record.id)).status
    assert (status.phase, status.error) == (
        "failed", JobFailure(code="environment_failed", message="environment.task: no task 'Reach'", service="env"),
    )  # fmt: skip


async def test_derived_fields_of_a_record_are_not_stored(bus: Bus) -> None:
    record = await JobStore(bus).create(JOB)
    assert record.links.events == f"/v1/jobs/{record.id}/events"
    entry = await bus.kv(subjects.JOBS).get(record.id)
    assert entry is not None
    assert b"links" not in (entry.value or b"")
    assert await JobStore(bus).get(record.id) == record
