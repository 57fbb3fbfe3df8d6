"""An accepted id is not accepted again, even if FEEDBACK no longer holds its item and the index was rebuilt."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.feedback import ids as ids_module
from penstock.services.coordinator.feedback.ids import purge_feedback
from penstock.services.coordinator.feedback.index import FeedbackIndex
from penstock.shared.protocol import subjects
from penstock.shared.protocol.live.interaction import FeedbackStatus
from penstock.shared.transport.bus import Bus
from tests.live_leader import record_decided


@asynccontextmanager
async def new_index(bus: Bus, directory: Path) -> AsyncIterator[FeedbackIndex]:
    """Run a new index, which knows only what the streams hold."""
    index = FeedbackIndex(bus, directory)
    running = asyncio.create_task(index.run())
    try:
        await index.catch_up(subjects.FEEDBACK)
        yield index
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def item(live: Any, record: Any, **more: Any) -> dict[str, Any]:
    return {
        "feedback_id": str(uuid.uuid4()), "inference_id": record.id, "metric_name": "accepted", "value": True, **more
    }  # fmt: skip


async def test_a_new_index_knows_the_ids_of_purged_feedback(
    live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids_module, "AT_ONCE", 2)
    record = await live.record("")
    posted = [item(live, record) for _ in range(5)]
    for one in posted:
        assert (await live.client.post("/feedback", json=one)).status_code == 202
    await live.service.index.catch_up(subjects.FEEDBACK)
    names = [one["feedback_id"] for one in posted]
    before = await live.service.index.known(names)
    newest = await live.bus.last(subjects.FEEDBACK, subjects.feedback(live.job))
    await purge_feedback(live.bus, live.job, below_seq=newest.seq)
    await purge_feedback(live.bus, live.job, below_seq=newest.seq + 1)
    assert not await live.items()
    async with new_index(live.bus, tmp_path / "new") as index:
        assert await index.known(names) == before
        row = await index.status_of(names[0])
        assert row is not None
        assert (row["metric"], row["status"]) == ("accepted", "received")


async def test_ids_of_decided_feedback_survive_the_deletion_of_another_user(live: Any, tmp_path: Path) -> None:
    """A decided item goes with the message that it shares with an item of the deleted user; its id stays known."""
    record = await live.record("")
    mine, other = item(live, record, user="gone"), item(live, record, user="stays")
    reply = await live.client.post("/v1/feedback/batch", json=[mine, other])
    assert reply.status_code == 207
    stale = FeedbackStatus(feedback=other["feedback_id"], status="rejected", reason="stale", time=1.0)
    await record_decided(live.bus, live.job, stale)
    assert (await live.client.delete("/v1/users/gone/data")).status_code == 202

    async def done() -> bool:
        return bool((await live.client.get("/v1/users/gone/data")).json()["status"] == "done")

    await live.until(done, "end of the deletion")
    assert not await live.items()
    async with new_index(live.bus, tmp_path / "new") as index:
        assert list(await index.known([other["feedback_id"], mine["feedback_id"]])) == [other["feedback_id"]]
        assert mine["feedback_id"] in index.erased


async def test_a_stream_without_room_for_ids_gives_up_the_feedback_first(
    live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await live.record("")
    posted = item(live, record)
    assert (await live.client.post("/feedback", json=posted)).status_code == 202
    publish = live.bus.publish

    async def has_room(subject: str, data: bytes, **options: Any) -> Any:
        if subject == subjects.feedback_ids(live.job) and await live.items():
            raise ids_module.StreamFull("no room")
        return await publish(subject, data, **options)

    monkeypatch.setattr(live.bus, "publish", has_room)
    newest = await live.bus.last(subjects.FEEDBACK, subjects.feedback(live.job))
    await purge_feedback(live.bus, live.job, below_seq=newest.seq + 1)
    async with new_index(live.bus, tmp_path / "new") as index:
        assert list(await index.known([posted["feedback_id"]])) == [posted["feedback_id"]]


def id_of(time_s: float) -> str:
    """Return a UUIDv7 that names the time ``time_s``."""
    return str(uuid.UUID(int=int(time_s * 1000) << 80 | 7 << 76 | 1 << 63 | 12345))


async def test_an_id_older_than_the_remembered_ones_is_refused(live: Any) -> None:
    record, day = await live.record(""), 86400.0
    live.service._ids_keep_s = 2 * day
    for age, status in ((3 * day, 422), (1 * day, 202)):
        posted = item(live, record, feedback_id=id_of(time.time() - age))
        reply = await live.client.post("/feedback", json=posted)
        assert reply.status_code == status
        if status == 422:
            assert "beyond_horizon" in reply.text and "/feedback_id" in reply.text
    assert (await live.client.post("/feedback", json=item(live, record))).status_code == 202, "a UUIDv4 names no time"
