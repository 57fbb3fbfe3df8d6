"""Replays of a job: a trainer repeats sealed batches. The rows of a replay are streamed to the client, with the live
feedback on which each batch is based."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec

from penstock.shared.errors import Conflict
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event, SealedGroup, decode_events
from penstock.shared.protocol.ids import new_attempt
from penstock.shared.protocol.messages import Ack, ReplayRequest, ReplayRow
from penstock.shared.runtime.ledger import LedgerArchive, read_ledger
from penstock.shared.transport.bus import Bus

__all__ = ["feedback_by_batch", "replay_rows"]

Row = dict[str, Any]

ROW_DEADLINE_S = 120.0
MAX_WAITING = 4096
"""Maximum number of rows that are buffered for a slow client. If more rows wait, the replay ends with a message that
rows were missed."""


async def replay_rows(
    bus: Bus,
    job: str,
    *,
    archive: LedgerArchive | None = None,
    from_batch: int | None,
    to_batch: int | None,
    feedback: bool = False,
) -> AsyncGenerator[Row, None]:
    """Ask a trainer for a replay and yield its rows; see ``Diagnosis.replay``.

    ``feedback``: add to each row the feedback behind its batch.

    Raises:
        Conflict: no trainer can replay the job now (raised before the first row).
    """
    admissions: dict[int, list[Row]] = {}
    if feedback:
        entries = [entry.data for entry in await read_ledger(bus, job, archive)]
        admissions = await asyncio.to_thread(_feedback_by_batch, entries)
    request = ReplayRequest(id=new_attempt(), from_batch=from_batch, to_batch=to_batch)
    rows: asyncio.Queue[ReplayRow] = asyncio.Queue(MAX_WAITING)
    missed = False

    def take(subject: str, data: bytes) -> None:
        nonlocal missed
        if missed or rows.full():
            missed = True
            return
        rows.put_nowait(unpack(data, ReplayRow)[0])

    progress = await bus.subscribe(subjects.replay_progress(request.id), take)
    try:
        ack, _ = unpack(await bus.request(subjects.REPLAY, pack(request, job=job), deadline_s=10), Ack)
        if not ack.ok:
            raise Conflict(ack.reason)
        row = ReplayRow()
        while not row.done:
            if missed and rows.empty():
                row = ReplayRow(done=True, summary=f"this client reads too slowly: {MAX_WAITING} rows waited for it")
            else:
                row = await _next(rows)
            shown: Row = msgspec.to_builtins(row)
            yield {**shown, "admissions": admissions.get(row.batch, [])} if feedback else shown
    finally:
        await progress.close()


def _feedback_by_batch(entries: Iterable[bytes]) -> dict[int, list[Row]]:
    return feedback_by_batch(event for data in entries for event in decode_events(data))


async def _next(rows: asyncio.Queue[ReplayRow]) -> ReplayRow:
    try:
        async with asyncio.timeout(ROW_DEADLINE_S):
            return await rows.get()
    except TimeoutError:
        return ReplayRow(done=True, summary=f"the trainer gave no sign for {ROW_DEADLINE_S:g} s")


def feedback_by_batch(events: Iterable[Event]) -> dict[int, list[dict[str, Any]]]:
    """Return rows by batch number: one row for each group of the batch that comes from live interactions.

    The rows have the order of the groups in the newest revision of the batch. A row has the ``draw``, its
    ``objective``, ``reward``, the ``reason`` for the reward (`feedback`, `default`, …), its ``lag``, and lists of ids:
    ``interactions`` in turn order, the interactions that it only refers to (``context``), and ``feedback``.
    """
    admissions: dict[int, Admission] = {}
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        match event:
            case Admitted():
                admissions |= {one.ordinal: one for one in event.admissions}
            case BatchSealed():
                found[event.number] = [
                    _group_row(group, admissions[group.draw.ordinal])
                    for group in event.groups
                    if group.draw.ordinal in admissions
                ]
            case _:
                pass
    return found


def _group_row(group: SealedGroup, admission: Admission) -> dict[str, Any]:
    return {
        "draw": str(group.draw),
        "objective": admission.objective,
        "reward": admission.reward,
        "reason": admission.reason,
        "lag": admission.lag,
        "interactions": list(admission.interactions),
        "context": list(admission.context),
        "feedback": list(admission.feedback),
    }
