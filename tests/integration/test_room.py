"""Streams without room: finished jobs give up what they have there, and nobody waits for a row that does not fit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.services.coordinator.outbox import Outbox
from penstock.services.coordinator.retention import GIVEN_UP
from penstock.services.coordinator.service import CoordinatorService
from penstock.services.coordinator.store import JobStore
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus

CONFIG = JobConfig.parse(
    {
        "name": "room",
        "model": {"config": {}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "train": {"batch_size": 16, "max_updates": 1},
    }
)


async def fill(bus: Bus, subject: str) -> None:
    """Publish until the stream takes no more, at last not even a small row."""
    for size in (900_000, 20_000, 500, 1):
        with pytest.raises(StreamFull):
            while True:
                await bus.publish(subject, b"x" * size)


async def test_a_full_stream_of_events_does_not_keep_status_and_clock(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
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
