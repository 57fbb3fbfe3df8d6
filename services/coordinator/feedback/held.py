"""The quarantine as the API shows it: lists held items from the index, and stores decisions on them as feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.feedback.index import FeedbackIndex
from penstock.services.coordinator.feedback.ingest import Ingest, Stored
from penstock.services.coordinator.feedback.items import Identity, derived_id, verdict_of
from penstock.services.coordinator.feedback.privacy import Pseudonyms
from penstock.shared.errors import Conflict, NotFound, ProtocolError, Refused, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, bare_id
from penstock.shared.transport.bus import Bus

__all__ = ["HeldFeedback"]

Row = dict[str, Any]


class HeldFeedback:
    """Quarantined feedback. ``show`` and ``decide`` raise NotFound, or Conflict if an item is no longer quarantined."""

    def __init__(self, bus: Bus, index: FeedbackIndex, ingest: Ingest, pseudonyms: Pseudonyms) -> None:
        self._bus, self._index, self._ingest, self._pseudonyms = bus, index, ingest, pseudonyms

    async def page(self, jobs: Sequence[str] | None, *, after: str, limit: int) -> list[Row]:
        """Return a ``HeldRow`` for each quarantined item of ``jobs`` (of all jobs if None), in the order of ids."""
        await self._index.catch_up(subjects.DECISIONS)
        return [_row(row) for row in await self._index.held(jobs, bare_id(after) or "", limit)]

    async def show(self, job: str, item: str) -> Row:
        """Return the row of an item with ``value``, ``target``, ``weight``, ``user`` and ``revision``."""
        row = await self._find(job, item)
        said = await self._read(row["seq"], row["id"])
        return _row(row) | {
            "value": said.value,
            "target": said.inference or said.episode,
            "weight": said.weight,
            "user": said.user,
            "revision": said.revision,
        }

    async def decide(self, job: str, item: str, verdict: Literal["release", "drop"], *, caller: Caller) -> Row:
        """Release an item, so that it counts, or drop it; return once the decision is on disk."""
        row = await self._find(job, item)
        name = f"{verdict} {row['id']} {row['revision']}"
        who = Identity(derived_id(self._pseudonyms.digest, "", name, 0), caller.id, chosen=True)
        (result,) = await self._ingest.add([(verdict_of(verdict, row["id"], job, who), True)])
        if isinstance(result, Refused):
            raise result
        if not isinstance(result, Stored):
            raise Unavailable(str(result))
        return {"feedback_id": row["id"], "verdict": verdict, "status": "accepted", "duplicate": result.duplicate}

    async def _find(self, job: str, item: str) -> Row:
        await self._index.catch_up(subjects.FEEDBACK, subjects.DECISIONS)
        id = bare_id(item)
        row = None if id is None else await self._index.status_of(id)
        if id is None or row is None or row["job"] != job:
            raise NotFound(f"job '{job}' has no feedback '{item[:80]}'")
        if row["status"] != "quarantined":
            raise Conflict(f"feedback '{id}' is not held back: it is {row['status']} {row['reason']}".rstrip())
        return row | {"id": id}

    async def _read(self, seq: int, id: str) -> Feedback:
        found = (await self._bus.get_whole(subjects.FEEDBACK, [seq])).get(seq)
        try:
            items = [] if found is None else unpack(found.data, FeedbackBatch)[0].items
        except ProtocolError:  # overwritten at its user's request
            items = []
        said = [one for one in items if one.id == id]
        if not said:
            raise NotFound(f"feedback '{id}' was deleted")
        return said[-1]


def _row(row: Row) -> Row:
    names = ("job", "metric", "source", "reason", "received", "time")
    return {"feedback_id": row["id"], **{name: row[name] for name in names}}
