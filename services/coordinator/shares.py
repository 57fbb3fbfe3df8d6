"""Shares of a store that all tenants use, so that a tenant that fills it is refused before the others are.

An owner may hold a share of the space that others have not taken: with 0.95 the first one gets 95 % of an empty store,
the next one 95 % of the rest. Some space always remains for another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections import Counter

from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.transport.bus import Bus

__all__ = ["EntryShares", "FeedbackShares"]

logger = logging.getLogger(__name__)

OVERHEAD_BYTES = 160
"""Approximate size of a stored message's subject, headers and framing."""
RETRY_S = 1.0
LOOK_S = 5.0
PLACES = 1024
"""Sequences that are counted together."""
LOOKED_AT = 0.25
"""Above this share of the stream, the oldest remaining messages of owners are looked up."""


class EntryShares:
    """Entries of a bucket by owner, with the time at which each expires."""

    def __init__(self, share: float) -> None:
        self.max_bytes = 0
        """Size of the bucket; while it is 0 (unknown), every entry is accepted."""
        self._share = share
        self._used: Counter[str] = Counter()
        self._entries: dict[str, tuple[str, int, float]] = {}
        self._ends: list[tuple[float, str]] = []

    def has_room(self, owner: str, nbytes: int) -> bool:
        """Return True if ``owner`` may store an entry of ``nbytes``."""
        self._expire()
        others = self._used.total() - self._used[owner]
        wanted = self._used[owner] + nbytes + OVERHEAD_BYTES
        return not self.max_bytes or wanted <= self._share * (self.max_bytes - others)

    def put(self, key: str, owner: str, nbytes: int, until: float) -> None:
        """Count an entry that was stored or replaced, and that expires at ``until`` (Unix seconds)."""
        self.remove(key)
        self._entries[key] = owner, nbytes + OVERHEAD_BYTES, until
        self._used[owner] += nbytes + OVERHEAD_BYTES
        heapq.heappush(self._ends, (until, key))

    def remove(self, key: str) -> None:
        """Stop counting an entry."""
        owner, nbytes, _ = self._entries.pop(key, ("", 0, 0.0))
        self._used[owner] -= nbytes
        if not self._used[owner]:
            del self._used[owner]

    def _expire(self) -> None:
        while self._ends and self._ends[0][0] <= bus_time():
            until, key = heapq.heappop(self._ends)
            if key in self._entries and self._entries[key][2] == until:
                self.remove(key)


class FeedbackShares:
    """Bytes of FEEDBACK by job, read from the headers of its messages, whichever replica stored them."""

    def __init__(self, bus: Bus, share: float) -> None:
        self._bus, self._share = bus, share
        self._max_bytes = self._bytes = self._looked_at = 0
        self._places: dict[str, Counter[int]] = {}
        """Bytes by job and group of PLACES sequences."""
        self._used: Counter[str] = Counter()

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look())
            async with contextlib.aclosing(
                self._bus.follow(subjects.FEEDBACK, f"{subjects.FEEDBACK.lower()}.>", headers_only=True)
            ) as messages:
                async for message in messages:
                    job, nbytes = message.subject.split(".")[1], message.nbytes + OVERHEAD_BYTES
                    self._places.setdefault(job, Counter())[message.seq // PLACES] += nbytes
                    self._used[job] += nbytes
                    self._bytes += nbytes if message.seq > self._looked_at else 0

    def has_room(self, job: str, nbytes: int) -> bool:
        """Return True if ``nbytes`` more of ``job`` may be stored."""
        own = min(self._used[job], self._bytes)
        others = max(0, self._bytes - own)
        is_free = self._share >= 1 or not self._max_bytes  # a full stream refuses the message itself
        return is_free or own + nbytes <= self._share * (self._max_bytes - others)

    async def _look(self) -> None:
        """Learn the fill level of the stream, and which messages are gone: the oldest ones of a job, or all of them."""
        while True:
            try:
                state = await self._bus.stream_state(subjects.FEEDBACK)
                self._max_bytes, self._bytes, self._looked_at = state.max_bytes, state.bytes, state.last_seq
                for job in [name for name, used in self._used.items() if used > LOOKED_AT * state.max_bytes]:
                    await self._drop_removed(job, state.last_seq)
            except Unavailable as error:
                logger.info("shares of FEEDBACK are not known: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _drop_removed(self, job: str, last_seq: int) -> None:
        first = last_seq + 1
        scan = self._bus.scan(subjects.FEEDBACK, subjects.feedback(job), headers_only=True)
        async with contextlib.aclosing(scan) as messages:
            async for message in messages:
                first = message.seq
                break
        places = self._places[job]
        for place in [place for place in places if place < first // PLACES]:
            self._used[job] -= places.pop(place)
