"""Events of a job, as the HTTP API shows them: pages of stored events, and a live stream until the job ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from penstock.services.coordinator.jobs.store import JobStore
from penstock.shared.errors import NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import TERMINAL_PHASES
from penstock.shared.transport.bus import Bus

__all__ = ["JobEvents", "is_last_event"]

Row = dict[str, Any]


class JobEvents:
    """Reader of the stream EVENTS. Every method may raise Unavailable."""

    def __init__(self, bus: Bus, store: JobStore) -> None:
        self._bus, self._store = bus, store

    async def page(self, job: str, *, after: int, limit: int) -> list[tuple[int, Row]]:
        """Return at most ``limit`` events as ``(stream sequence number, row)``, oldest first. Only events with stream
        sequence numbers above ``after`` are returned.

        A row has at least ``time`` (Unix seconds), ``level`` (info|warning|error), ``type`` (such as ``phase``,
        ``step``, ``checkpoint``, ``worker``) and ``message``. Raises NotFound: there is no such job.
        """
        await self._store.get(job)
        found: list[tuple[int, Row]] = []
        scan = self._bus.scan(subjects.EVENTS, subjects.events(job), start_seq=after + 1)
        async with contextlib.aclosing(scan) as messages:
            async for message in messages:
                found.append((message.seq, msgspec.json.decode(message.data)))
                if len(found) >= limit:
                    break
        return found

    async def newest(self, job: str) -> int:
        """Return the stream sequence number of the newest event of a job, or 0 if it has none."""
        last = await self._bus.last(subjects.EVENTS, subjects.events(job))
        return last.seq if last is not None else 0

    async def follow(self, job: str, *, after: int) -> AsyncIterator[tuple[int, Row]]:
        """Yield events and wait for new ones; see ``page``. Ends after the last event of a terminal job.

        The API closes this async generator when the client disconnects. Stream sequence numbers rise strictly.
        """
        record = await self._store.get(job)
        last = await self._bus.last(subjects.EVENTS, subjects.events(job))
        since = record.extended_at.timestamp() if record.extended_at is not None else 0.0
        over = record.status.phase in TERMINAL_PHASES or (last is not None and is_last_event(last.data, since))
        if over:
            for item in await self.page(job, after=after, limit=1_000_000):
                yield item
            return
        async with contextlib.aclosing(
            self._bus.follow(subjects.EVENTS, subjects.events(job), start_seq=after + 1)
        ) as messages:
            async for message in messages:
                yield message.seq, msgspec.json.decode(message.data)
                if is_last_event(message.data, since):
                    return

    async def is_kept(self, seq: int) -> bool:
        """Return True if the event with stream sequence number ``seq`` is still stored. If it is not, the stream may
        have dropped later events, too."""
        try:
            await self._bus.get(subjects.EVENTS, seq)
        except NotFound:
            return False
        return True


def is_last_event(data: bytes, since: float = 0.0) -> bool:
    """Return True if an event reports the end of the job, not earlier than ``since`` (Unix seconds: the job's last
    extension)."""
    row = msgspec.json.decode(data)
    return row["time"] >= since and row["type"] == "phase" and str(row["message"]).split(":")[0] in TERMINAL_PHASES
