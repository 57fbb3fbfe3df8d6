"""The file of the feedback index: what is deleted is not in it, and a broken one is built anew from the streams."""

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
    """The index, its log and what else is there, byte by byte."""
    return {file.name: file.read_bytes() for file in directory.glob("*.sqlite*")}


async def judged(desk: Any, user: str, count: int = 40) -> list[str]:
    """Answers to a user that were rated and talked about; ids of the items."""
    items = []
    for _ in range(count):
        record = await desk.record(user, text="a secret answer")
        about = {"inference_id": record.id, "user": user}
        items += [
            {**about, "metric_name": "accepted", "value": True, "comment": "a secret word"},
            {**about, "metric_name": "comment", "value": "a secret comment"},
        ]
    reply = await desk.client.post("/v1/feedback/batch", json=items)
    assert reply.status_code == 207
    return [row["id"] for row in reply.json()["data"]]


async def test_nothing_of_a_deleted_user_is_left_in_the_file_once_it_is_reported_done(desk: Any) -> None:
    gone = await judged(desk, USER)
    await judged(desk, "somebody else")
    await desk.desk.index.catch_up(subjects.FEEDBACK, subjects.INTERACTIONS)
    pseudonym = desk.desk.pseudonyms.of(USER)
    records = await desk.bus.read(subjects.INTERACTIONS, subjects.interactions(desk.job))
    assert (await desk.client.delete(f"/v1/users/{USER}/data")).status_code == 202

    async def done() -> bool:
        return bool((await desk.client.get(f"/v1/users/{USER}/data")).json()["status"] == "done")

    await desk.until(done, "end of the deletion")
    found = files(desk.desk.index.directory)
    assert found
    for name, data in found.items():
        for secret in (USER, pseudonym, "secret"):
            assert secret.encode() not in data, f"{secret} in {name}"
    index = sqlite3.connect(desk.desk.index.directory / "feedback-0.sqlite")
    left = {row[0] for table in ("feedback", "target", "decided") for row in index.execute(f"SELECT id FROM {table}")}
    index.close()
    interactions = {message.subject.rpartition(".")[2] for message in records[:40]}
    assert not left & ({*gone} | interactions)
    assert len(left) == 40 * 2 + 40 * 2, "what others said, their answers and episodes"


@pytest.mark.long
async def test_a_deletion_is_not_done_before_the_index_has_forgotten_it(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await judged(desk, USER, 1)
    held, reach = asyncio.Event(), desk.desk.index.reach

    async def later(*args: Any, **more: Any) -> None:
        await held.wait()
        await reach(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(desk.desk.index, "reach", later)
        assert (await desk.client.delete(f"/v1/users/{USER}/data")).json()["status"] == "running"

        async def overwritten() -> bool:
            return not await desk.items()

        await desk.until(overwritten, "deletion in the streams")
        assert (await desk.client.get(f"/v1/users/{USER}/data")).json()["status"] == "running"
        held.set()

    async def done() -> bool:
        return bool((await desk.client.get(f"/v1/users/{USER}/data")).json()["status"] == "done")

    await desk.until(done, "end of the deletion")


async def test_indexes_that_nobody_keeps_up_go_with_a_deletion(desk: Any) -> None:
    directory = desk.desk.index.directory
    open_projection(directory).close()  # a second coordinator on this host, which is gone
    assert {"feedback-0.sqlite", "feedback-1.sqlite"} <= files(directory).keys()
    await judged(desk, USER, 1)
    assert (await desk.client.delete(f"/v1/users/{USER}/data")).status_code == 202

    async def alone() -> bool:
        return "feedback-1.sqlite" not in files(directory)

    await desk.until(alone, "end of the other file")
    assert "feedback-0.sqlite" in files(directory)


@pytest.mark.parametrize("revision", [0, 2])
def test_what_is_told_of_what_is_deleted_leaves_no_row(tmp_path: Path, revision: int) -> None:
    """A late word of it is told in another stream, and read once the deletion was."""
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
    """The header is good; what follows is not."""
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(bytes(data))


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
        other.execute("DROP TABLE feedback")
    other.close()


def _foreign(path: Path) -> None:
    """Tables of the same names, and no version."""
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE feedback (other TEXT)")
    other.close()


@pytest.mark.parametrize("damage", [_garbage, _torn, _newer, _foreign])
async def test_a_broken_file_is_built_anew_at_the_start(
    open_desk: Any, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_desk() as before:
        body = {"inference_id": before.new_id(), "metric_name": "accepted", "value": True}
        body["feedback_id"] = str(uuid.uuid4())
        await before.accept(**body)
        await before.desk.index.catch_up(subjects.FEEDBACK)
        path = before.desk.index.directory / "feedback-0.sqlite"
    with sqlite3.connect(path) as other:  # nothing of it is left in the log
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    damage(path)
    with caplog.at_level(logging.WARNING):
        async with open_desk() as after:
            assert (await after.status_of(body["feedback_id"]))["status"] == "received"
            assert (await after.post(body)).json()["duplicate"]
    assert [record for record in caplog.records if "feedback-0.sqlite is built anew" in record.message]


@pytest.mark.long
async def test_a_file_that_breaks_meanwhile_is_built_anew(desk: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Readers are told to come again meanwhile, and posts are taken."""
    ids = await judged(desk, "somebody", 100)
    index = desk.desk.index
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
            await index.funnel(desk.job)

        async def again() -> bool:
            try:
                return bool(await index.status_of(ids[-1]))
            except Unavailable:
                return False

        await desk.until(again, "new index")
    assert [record for record in caplog.records if "feedback index is built anew" in record.message]
    assert (await desk.accept())["duplicate"] is False
    await index.catch_up(subjects.FEEDBACK)
    reply = await desk.client.get(f"/v1/jobs/{desk.job}/feedback")
    assert (reply.status_code, reply.json()["items"]) == (200, 201)
