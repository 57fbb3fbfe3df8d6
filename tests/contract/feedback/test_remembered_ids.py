"""An id that was accepted is not accepted again, also where its item is no longer in FEEDBACK and the index is new."""

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
    """One that knows only what the streams say."""
    index = FeedbackIndex(bus, directory)
    running = asyncio.create_task(index.run())
    try:
        await index.catch_up(subjects.FEEDBACK)
        yield index
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def item(desk: Any, record: Any, **more: Any) -> dict[str, Any]:
    return {
        "feedback_id": str(uuid.uuid4()), "inference_id": record.id, "metric_name": "accepted", "value": True, **more
    }  # fmt: skip


async def test_ids_of_what_made_room_are_known_to_a_new_index(
    desk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids_module, "AT_ONCE", 2)
    record = await desk.record("")
    posted = [item(desk, record) for _ in range(5)]
    for one in posted:
        assert (await desk.client.post("/feedback", json=one)).status_code == 202
    await desk.desk.index.catch_up(subjects.FEEDBACK)
    names = [one["feedback_id"] for one in posted]
    before = await desk.desk.index.known(names)
    newest = await desk.bus.last(subjects.FEEDBACK, subjects.feedback(desk.job))
    await purge_feedback(desk.bus, desk.job, below_seq=newest.seq)
    await purge_feedback(desk.bus, desk.job, below_seq=newest.seq + 1)
    assert not await desk.items()
    async with new_index(desk.bus, tmp_path / "new") as index:
        assert await index.known(names) == before
        row = await index.status_of(names[0])
        assert row is not None
        assert (row["metric"], row["status"]) == ("accepted", "received")


async def test_ids_of_others_that_a_deletion_does_not_store_anew_are_known(desk: Any, tmp_path: Path) -> None:
    """They were decided, so their message goes with that of the user; their ids stay."""
    record = await desk.record("")
    mine, other = item(desk, record, user="gone"), item(desk, record, user="stays")
    reply = await desk.client.post("/v1/feedback/batch", json=[mine, other])
    assert reply.status_code == 207
    stale = FeedbackStatus(feedback=other["feedback_id"], status="rejected", reason="stale", time=1.0)
    await record_decided(desk.bus, desk.job, stale)
    assert (await desk.client.delete("/v1/users/gone/data")).status_code == 202

    async def done() -> bool:
        return bool((await desk.client.get("/v1/users/gone/data")).json()["status"] == "done")

    await desk.until(done, "end of the deletion")
    assert not await desk.items()
    async with new_index(desk.bus, tmp_path / "new") as index:
        assert list(await index.known([other["feedback_id"], mine["feedback_id"]])) == [other["feedback_id"]]
        assert mine["feedback_id"] in index.erased


async def test_a_stream_without_room_for_ids_gives_up_the_feedback_first(
    desk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await desk.record("")
    posted = item(desk, record)
    assert (await desk.client.post("/feedback", json=posted)).status_code == 202
    publish = desk.bus.publish

    async def has_room(subject: str, data: bytes, **options: Any) -> Any:
        if subject == subjects.feedback_ids(desk.job) and await desk.items():
            raise ids_module.StreamFull("no room")
        return await publish(subject, data, **options)

    monkeypatch.setattr(desk.bus, "publish", has_room)
    newest = await desk.bus.last(subjects.FEEDBACK, subjects.feedback(desk.job))
    await purge_feedback(desk.bus, desk.job, below_seq=newest.seq + 1)
    async with new_index(desk.bus, tmp_path / "new") as index:
        assert list(await index.known([posted["feedback_id"]])) == [posted["feedback_id"]]


def id_of(time_s: float) -> str:
    """A UUIDv7 that was made then."""
    return str(uuid.UUID(int=int(time_s * 1000) << 80 | 7 << 76 | 1 << 63 | 12345))


async def test_an_id_that_is_older_than_what_is_remembered_is_refused(desk: Any) -> None:
    record, day = await desk.record(""), 86400.0
    desk.desk._ids_keep_s = 2 * day
    for age, status in ((3 * day, 422), (1 * day, 202)):
        posted = item(desk, record, feedback_id=id_of(time.time() - age))
        reply = await desk.client.post("/feedback", json=posted)
        assert reply.status_code == status
        if status == 422:
            assert "beyond_horizon" in reply.text and "/feedback_id" in reply.text
    assert (await desk.client.post("/feedback", json=item(desk, record))).status_code == 202, "it tells no time"
