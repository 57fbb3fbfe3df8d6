"""This version reads, folds and audits the data directory of 0.1.0, byte for byte as that version left it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.services import Services, build_services
from penstock.services.coordinator.training.journal import Journal, archive_whole
from penstock.shared.config.service import ServiceSettings, checkpoint_path
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import FeedbackBatch, Interaction
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

SIZES = {"experience_bytes": 64 << 20, "stream_bytes": 32 << 20}


@pytest.fixture
async def old(recorded: Path) -> AsyncIterator[tuple[Bus, Services]]:
    """Bus and services of this version on the recorded data."""
    with NatsServer(recorded / "data" / "nats") as server:
        async with await Bus.connect(server.url, name="today") as bus:
            await bus.ensure_streams(**SIZES)
            settings = ServiceSettings(data_dir=recorded / "data", nats_monitor_url=server.monitor_url)
            yield bus, build_services(bus, JobStore(bus), Members(), {}, settings)


async def test_recorded_jobs_fold_and_pass_the_audit(old: tuple[Bus, Services]) -> None:
    bus, services = old
    jobs = {entry.name: entry for entry in (await services.jobs.index()).all()}
    assert {name: entry.phase for name, entry in jobs.items()} == {
        "finished": "succeeded", "unfinished": "paused", "agent": "paused",
    }  # fmt: skip
    for name, trained, batches in (("finished", 6, 3), ("unfinished", 14, 7), ("agent", 4, 2)):
        report = await services.diagnosis.audit(jobs[name].id)
        assert report["ok"], (name, report["violations"])
        assert (report["equation"]["trained"], report["batches"]) == (trained, batches)
        state = await Journal(bus, jobs[name].id).load()
        assert state.checkpoint is not None
        folder = checkpoint_path(services.settings.data_dir, state.checkpoint.path)
        assert (folder / "COMMIT").exists(), "the recorded path is resolved in the new place"
        assert {f"{prefix}/mean" for prefix in ("reward",)} <= {
            row["name"] for row in await services.charts.names(jobs[name].id)
        }


async def test_recorded_feedback_is_read(old: tuple[Bus, Services]) -> None:
    bus, services = old
    (job,) = [entry.id for entry in (await services.jobs.index()).all() if entry.kind == "online_rl"]
    batches = await bus.read(subjects.FEEDBACK, subjects.feedback(job))
    items = [item for message in batches for item in unpack(message.data, FeedbackBatch)[0].items]
    assert [item.metric for item in items] == ["accepted"] * 5
    turns = await bus.read(subjects.INTERACTIONS, subjects.interactions(job))
    assert len([unpack(message.data, Interaction) for message in turns]) == 7


async def test_recorded_ledgers_are_archived(old: tuple[Bus, Services]) -> None:
    bus, services = old
    for entry in (await services.jobs.index()).all():
        before = await services.diagnosis.audit(entry.id)
        await archive_whole(bus, entry.id, services.archive, least=1)
        assert len(await bus.read(subjects.LEDGER, subjects.ledger(entry.id))) == 1
        assert await services.diagnosis.audit(entry.id) == before
