"""Rows of a replay, from the trainer that runs it to the client that watches it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from penstock.services.coordinator.queries import replays as module
from penstock.services.coordinator.queries.replays import replay_rows
from penstock.shared.errors import Conflict
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, SealedGroup, encode_events
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ack, ReplayRequest, ReplayRow
from penstock.shared.transport.bus import Bus


def trainer(bus: Bus, rows: int) -> Callable[[bytes], Awaitable[bytes]]:
    """Return a trainer that sends ``rows`` rows at once, or refuses the replay if ``rows`` is 0."""

    async def answer(data: bytes) -> bytes:
        request, _ = unpack(data, ReplayRequest)
        if not rows:
            return pack(Ack(ok=False, reason="nothing was trained yet"))
        for batch in range(1, rows + 1):
            row = ReplayRow(batch=batch, total=rows, match=True, done=batch == rows, ok=batch == rows)
            await bus.notify(subjects.replay_progress(request.id), pack(row))
        return pack(Ack(ok=True))

    return answer


async def test_rows_come_in_order_to_the_last_one(bus: Bus) -> None:
    async with await bus.serve(subjects.REPLAY, trainer(bus, 5)):
        rows = [row async for row in replay_rows(bus, "job_a", from_batch=None, to_batch=None)]
    assert [row["batch"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["ok"]


async def test_rows_name_the_feedback_of_a_batch(bus: Bus) -> None:
    """Rows use the newest revision of each batch, and leave out draws without live answers."""
    sealed = [SealedGroup(Draw(ordinal), "a", 1, "d", 0, 0, [1.0], 3, "w") for ordinal in (7, 8, 9)]
    batch = BatchSealed(writer_epoch=1, time=2.0, number=2, revision=1, start_version=0, update_index=0, groups=sealed)
    about = [
        Admission(7, {"a": 1, "b": 2}, {"f": 1}, 0.5, 1, "k", "", "feedback", 1.0),
        Admission(8, {}, {"g": 2}, 1.0, 0, "k", "", "correction", 1.0, "supervised", {"c": 3}),
    ]
    admitted = Admitted(writer_epoch=1, time=1.0, admissions=about, low_interactions=0, low_feedback=0)
    await bus.publish(subjects.ledger("job_a"), encode_events([admitted, batch]))
    again = msgspec.structs.replace(batch, revision=2, groups=sealed[1:])
    async with await bus.serve(subjects.REPLAY, trainer(bus, 3)):
        rows = [row async for row in replay_rows(bus, "job_a", from_batch=None, to_batch=None, feedback=True)]
        assert [row["batch"] for row in rows if row["admissions"]] == [2]
        first, second = rows[1]["admissions"]
        assert (first["draw"], first["interactions"], first["feedback"]) == ("7.0", ["a", "b"], ["f"])
        assert (second["objective"], second["context"], second["feedback"]) == ("supervised", ["c"], ["g"])
        assert (first["reward"], first["reason"], first["lag"]) == (0.5, "feedback", 1)
        await bus.publish(subjects.ledger("job_a"), encode_events([again]))
        rows = [row async for row in replay_rows(bus, "job_a", from_batch=None, to_batch=None, feedback=True)]
    assert [one["draw"] for one in rows[1]["admissions"]] == ["8.0"]


async def test_a_refused_replay_names_the_reason(bus: Bus) -> None:
    async with await bus.serve(subjects.REPLAY, trainer(bus, 0)):
        with pytest.raises(Conflict, match="nothing was trained yet"):
            await anext(replay_rows(bus, "job_a", from_batch=None, to_batch=None))


async def test_a_client_that_reads_too_slowly_is_cut_off_with_the_reason(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    rows = []
    async with await bus.serve(subjects.REPLAY, trainer(bus, 50)):
        async for row in replay_rows(bus, "job_a", from_batch=None, to_batch=None):
            rows.append(row)
            await asyncio.sleep(0.05)
    assert rows[-1]["done"]
    assert not rows[-1]["ok"]
    assert rows[-1]["summary"] == "this client reads too slowly: 4 rows waited for it"
    assert len(rows) < 50
