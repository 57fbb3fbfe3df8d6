"""The file of the feedback index: it holds nothing that was deleted, and is rebuilt from the streams if it breaks."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.feedback.projection import open_projection
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.live.interaction import Erasure, FeedbackStatus

USER = "alice@example.org"


def files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of the index and of its other SQLite files, by name."""
    return {file.name: file.read_bytes() for file in directory.glob("*.sqlite*")}


async def judged(live: Any, user: str, count: int = 40) -> list[str]:
    """Record ``count`` answers to a user, and post two items on each; return the ids of the items."""
    items = []
    for _ in range(count):
        record = await live.record(user, text="a secret answer")
        about = {"inference_id": record.id, "user": user}
        items += [
            {**about, "metric_name": "accepted", "value": True, "comment": "a secret word"},
            {**about, "metric_name": "comment", "value": "a secret comment"},
        ]
    reply = await live.client.post("/v1/feedback/batch", json=items)
    assert reply.status_code == 207
    return [row["id"] for row in reply.json()["data"]]


async def test_nothing_of_a_deleted_user_is_left_in_the_file_once_it_is_reported_done(live: Any) -> None:
    gone = await judged(live, USER)
    await judged(live, "somebody else")
    await live.service.index.catch_up(subjects.FEEDBACK, subjects.INTERACTIONS)
    pseudonym = live.service.pseudonyms.of(USER)
    records = await live.bus.read(subjects.INTERACTIONS, subjects.interactions(live.job))
    assert (await live.client.delete(f"/v1/users/{USER}/data")).status_code == 202

    async def done() -> bool:
        return bool((await live.client.get(f"/v1/users/{USER}/data")).json()["status"] == "done")

    await live.until(done, "end of the deletion")
    found = files(live.service.index.directory)
    assert found
    for name, data in found.items():
        for secret in (USER, pseudonym, "secret"):
            assert secret.encode() not in data, f"{secret} in {name}"
    index = sqlite3.connect(live.service.index.directory / "feedback-0.sqlite")
    left = {row[0] for table in ("feedback", "target", "decided") for row in index.execute(f"SELECT id FROM {table}")}
    index.close()
    interactions = {message.subject.rpartition(".")[2] for message in records[:40]}
    assert not left & ({*gone} | interactions)
    assert len(left) == 40 * 2 + 40 * 2, "feedback of others, their answers and episodes"


@pytest.mark.long
async def test_a_deletion_is_not_done_before_the_index_has_forgotten_it(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await judged(live, USER, 1)
    held, reach = asyncio.Event(), live.service.index.reach

    async def later(*args: Any, **more: Any) -> None:
        await held.wait()
        await reach(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(live.service.index, "reach", later)
        assert (await live.client.delete(f"/v1/users/{USER}/data")).json()["status"] == "running"

        async def overwritten() -> bool:
            return not await live.items()

        await live.until(overwritten, "deletion in the streams")
        assert (await live.client.get(f"/v1/users/{USER}/data")).json()["status"] == "running"
        held.set()

    async def done() -> bool:
        return bool((await live.client.get(f"/v1/users/{USER}/data")).json()["status"] == "done")

    await live.until(done, "end of the deletion")


async def test_a_deletion_removes_indexes_that_no_process_updates(live: Any) -> None:
    directory = live.service.index.directory
    open_projection(directory).close()  # a second coordinator on this host, which is gone
    assert {"feedback-0.sqlite", "feedback-1.sqlite"} <= files(directory).keys()
    await judged(live, USER, 1)
    assert (await live.client.delete(f"/v1/users/{USER}/data")).status_code == 202

    async def alone() -> bool:
        return "feedback-1.sqlite" not in files(directory)

    await live.until(alone, "end of the other file")
    assert "feedback-0.sqlite" in files(directory)


@pytest.mark.parametrize("revision", [0, 2])
def test_a_late_status_of_deleted_feedback_leaves_no_row(tmp_path: Path, revision: int) -> None:
    """The late status comes from another stream, and the index reads it after the deletion."""
    gone = str(uuid.uuid4())
    late: dict[str, Any] = {"status": "rejected", "reason": "too_late", "revision": revision, "time": 2.0}
    index = open_projection(tmp_path)
    index.apply([], [], [Erasure(user="u", interactions=[], feedback=[gone], time=1.0)], [], [])
    index.apply([], [FeedbackStatus(feedback=gone, **late)], [], [], [])
    index.close()
    found = sqlite3.connect(tmp_path / "feedback-0.sqlite")
    assert list(found.execute("SELECT id FROM feedback")) == []
    found.close()


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xa5garbage" * 4096)


def _torn(path: Path) -> None:
    """Overwrite all that follows the header of the file."""
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(bytes(data))


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
        other.execute("DROP TABLE feedback")
    other.close()


def _foreign(path: Path) -> None:
    """Replace the file by a database without a version whose table has the same name and other columns."""
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE feedback (other TEXT)")
    other.close()


@pytest.mark.parametrize("damage", [_garbage, _torn, _newer, _foreign])
async def test_a_broken_file_is_built_anew_at_the_start(
    open_live: Any, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_live() as before:
        body = {"inference_id": before.new_id(), "metric_name": "accepted", "value": True}
        body["feedback_id"] = str(uuid.uuid4())
        await before.accept(**body)
        await before.service.index.catch_up(subjects.FEEDBACK)
        path = before.service.index.directory / "feedback-0.sqlite"
    with sqlite3.connect(path) as other:  # nothing of it is left in the log
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    damage(path)
    with caplog.at_level(logging.WARNING):
        async with open_live() as after:
            assert (await after.status_of(body["feedback_id"]))["status"] == "received"
            assert (await after.post(body)).json()["duplicate"]
    assert [record for record in caplog.records if "feedback-0.sqlite is built anew" in record.message]


@pytest.mark.long
async def test_a_file_that_breaks_in_use_is_built_anew(live: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Reads raise `Unavailable` until the index is rebuilt; then both reads and posts succeed."""
    ids = await judged(live, "somebody", 100)
    index = live.service.index
    await index.catch_up(subjects.FEEDBACK, subjects.INTERACTIONS)
    await index._write(index._projection._empty_log)
    path = index.directory / "feedback-0.sqlite"
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))
    index._projection._reader.execute("PRAGMA cache_size = 0")  # what it has read it would not read again
    index._projection._reader.execute("PRAGMA shrink_memory")
    with caplog.at_level(logging.ERROR):
        with pytest.raises(Unavailable):
            await index.funnel(live.job)

        async def again() -> bool:
            try:
                return bool(await index.status_of(ids[-1]))
            except Unavailable:
                return False

        await live.until(again, "new index")
    assert [record for record in caplog.records if "feedback index is built anew" in record.message]
    assert (await live.accept())["duplicate"] is False
    await index.catch_up(subjects.FEEDBACK)
    reply = await live.client.get(f"/v1/jobs/{live.job}/feedback")
    assert (reply.status_code, reply.json()["items"]) == (200, 201)
