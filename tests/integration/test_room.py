"""Streams without room: finished jobs release their data, and no row waits for room that it cannot get."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from penstock.services.coordinator import service as service_module
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.retention import GIVEN_UP
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.effects import batch_id, purge_manifests
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.service import CoordinatorService
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Checkpointed, Promoted
from penstock.shared.transport.bus import MSG_ID, Bus
from penstock.shared.transport.server import NatsServer

CONFIG = JobConfig.parse(
    {
        "name": "room",
        "model": {"config": {}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "train": {"batch_size": 16, "max_updates": 1},
    }
)


async def test_a_running_job_keeps_batches_that_no_checkpoint_covers(bus: Bus) -> None:
    for number in range(1, 6):
        await bus.publish(subjects.batches("job_a"), b"a", msg_id=batch_id("job_a", number, 1, 1))
        await bus.publish(subjects.batches("job_b"), b"b", msg_id=batch_id("job_b", number, 1, 1))
    assert await purge_manifests(bus, "job_a", up_to=0) == 0
    assert await purge_manifests(bus, "job_a", up_to=3) == 3
    left = await bus.read(subjects.BATCHES, subjects.batches("job_a"), headers_only=True)
    assert [message.headers[MSG_ID] for message in left] == ["batch:job_a:4.1.1", "batch:job_a:5.1.1"]
    assert len(await bus.read(subjects.BATCHES, subjects.batches("job_b"))) == 5


@pytest.mark.long
async def test_cleaning_up_after_a_job_waits_for_the_bus(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = CoordinatorService(bus, ServiceSettings(data_dir=tmp_path))
    await bus.publish(subjects.tickets("job_done"), b"nobody needs it")
    nats_server.kill()
    with caplog.at_level(logging.WARNING):
        cleaning = asyncio.create_task(service.clean_up("job_done"))
        async with asyncio.timeout(30):
            while "cleaning up after job job_done" not in caplog.text:
                await asyncio.sleep(0.05)
    assert not cleaning.done()
    nats_server.start()
    await asyncio.wait_for(cleaning, 60)
    assert (await bus.stream_state(subjects.TICKETS)).messages == 0


async def test_interactions_and_decisions_are_removed_for_room(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "FULL_SHARE", -1.0)
    service = CoordinatorService(bus, ServiceSettings(data_dir=tmp_path))
    plain, finished = [(await service.store.create(CONFIG)).id for _ in range(2)]
    await service.store.set_status(finished, phase="succeeded")
    for job in (plain, finished):
        await bus.publish(subjects.interaction(job, "i1"), b"x")
        await bus.publish(subjects.decisions(job), b"x")
    left = []
    for _ in range(2):
        await service.make_room(subjects.INTERACTIONS)
        left.append([len(await bus.read(subjects.INTERACTIONS, subjects.interactions(j))) for j in (plain, finished)])
    assert left == [[1, 0], [0, 0]]
    for _ in range(3):
        await bus.publish(subjects.decisions(plain), b"newer")
    await service.make_room(subjects.DECISIONS)
    assert not await bus.read(subjects.DECISIONS, subjects.decisions(finished))
    await service.make_room(subjects.DECISIONS)
    assert [m.data for m in await bus.read(subjects.DECISIONS, subjects.decisions(plain))] == [b"newer"] * 2


async def test_batches_needed_for_the_served_version_stay(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "FULL_SHARE", -1.0)
    service = CoordinatorService(bus, ServiceSettings(data_dir=tmp_path))
    record = await service.store.create(CONFIG)
    runner = JobRunner(bus, service.store, Members(), record, epoch=1, data_dir=tmp_path)
    checkpoints = {
        number: Checkpointed(
            writer_epoch=1, time=0.0, number=number, version=number, digest="d", path="p", trainer_epoch=1, low_seq=0
        )
        for number in (0, 2, 4)
    }
    state = LedgerState(checkpoints=checkpoints, checkpoint=checkpoints[4], last_trained=5)
    state.promoted = Promoted(writer_epoch=1, time=0.0, version=3, number=3, digest="d", reason="passed")
    runner.run, runner.ready = JobRun(CONFIG, state, num_ordinals=None, writer_epoch=1), True
    service.runners[record.id] = runner
    for number in range(1, 6):
        await bus.publish(subjects.batches(record.id), b"b", msg_id=batch_id(record.id, number, 1, 1))
    left = []
    for served in (state.promoted, None):  # refused versions follow it; the newest one is served
        state.promoted = served
        await service.make_room(subjects.BATCHES)
        messages = await bus.read(subjects.BATCHES, subjects.batches(record.id), headers_only=True)
        left.append([message.headers[MSG_ID].rpartition(":")[2] for message in messages])
    assert left == [["3.1.1", "4.1.1", "5.1.1"], ["5.1.1"]]


async def fill(bus: Bus, subject: str) -> None:
    """Publish until the stream refuses even a message of one byte."""
    for size in (900_000, 20_000, 500, 1):
        with pytest.raises(StreamFull):
            while True:
                await bus.publish(subject, b"x" * size)


async def test_a_full_events_stream_delays_neither_status_nor_clock(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    store = JobStore(bus)
    job = (await store.create(CONFIG)).id
    await fill(bus, subjects.events("job_other"))
    outbox = Outbox(bus, store, job)
    with caplog.at_level(logging.ERROR):
        outbox.event("info", "step", "does not fit")
        outbox.clock(3, "d", 1)
        outbox.status({"phase": "running", "message": "", "step": 3})
        await outbox.flush()
    assert (await store.get(job)).status.step == 3
    clock = await bus.kv(subjects.POLICY).get(job)
    assert clock is not None
    assert b'"version":3' in (clock.value or b"")
    assert f"a row of {subjects.events(job)} is lost" in caplog.text


@pytest.mark.parametrize("stream", [subjects.BATCHES, subjects.EVENTS])
async def test_a_full_stream_gives_up_the_oldest_finished_job(bus: Bus, tmp_path: Path, stream: str) -> None:
    service = CoordinatorService(bus, ServiceSettings(data_dir=tmp_path))
    finished, running = [(await service.store.create(CONFIG)).id for _ in range(2)]
    subject = GIVEN_UP[stream]
    await bus.publish(subject(running), b"kept")
    await bus.publish(subject(finished), b"kept while there is room")
    await service.store.set_status(finished, phase="succeeded")
    await service.make_room(stream)
    assert await bus.read(stream, subject(finished))
    await fill(bus, subject(finished))
    await service.make_room(stream)
    assert not await bus.read(stream, subject(finished))
    assert len(await bus.read(stream, subject(running))) == 1
