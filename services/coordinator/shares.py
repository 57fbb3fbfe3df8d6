"""Shares of a store that all tenants use: a tenant that fills the store is refused before the other tenants are.

An owner may hold a share of the space that other owners leave free. With a share of 0.95 the first owner gets 95 % of
an empty store, and the next owner 95 % of the rest. Some space always remains for a further owner.
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
from penstock.shared.protocol.live.interaction import sender_number, senders_of
from penstock.shared.protocol.parts import PART
from penstock.shared.transport.bus import Bus, Message

__all__ = ["KEY_SHARE", "EntryShares", "FeedbackShares"]

logger = logging.getLogger(__name__)

OVERHEAD_BYTES = 160
"""Approximate size of a stored message's subject, headers and framing."""
RETRY_S = 1.0
POLL_S = 5.0
KEY_SHARE = 0.95
"""Largest fraction that one key may use of a job's space, without the space that the job's other keys use."""
PLACES = 1024
"""Bytes are counted per range of this many consecutive stream sequence numbers."""
LOOKED_AT = 0.25
"""Share of the stream FEEDBACK. For a job that uses more than this share, the oldest remaining message is looked up
regularly, so that messages that the stream has removed are no longer counted."""


class EntryShares:
    """Counts the bytes of a bucket's entries by owner; an entry counts until it expires."""

    def __init__(self, share: float) -> None:
        self.max_bytes = 0
        """Size of the bucket; while it is 0 (unknown), every entry is accepted."""
        self._share = share
        self._used: Counter[str] = Counter()
        self._entries: dict[str, tuple[str, int, float]] = {}
        self._ends: list[tuple[float, str]] = []

    def has_room(self, owner: str, nbytes: int) -> bool:
        """Return True if ``owner`` may store another entry of ``nbytes`` bytes."""
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
        """Stop counting the entry ``key`` of the bucket."""
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
    """Counts the bytes of the stream FEEDBACK by job and key, including messages that other replicas stored.

    A job may use a share of the space that other jobs leave free. Of the space of its job, a key may use the fraction
    KEY_SHARE of what the job's other keys leave free.
    """

    def __init__(self, bus: Bus, share: float) -> None:
        self._bus, self._share = bus, share
        self._max_bytes = self._bytes = self._looked_at = 0
        self._jobs: dict[str, _JobBytes] = {}

    async def run(self) -> None:
        """Follow the stream FEEDBACK and count its messages, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refresh())
            async with contextlib.aclosing(
                self._bus.follow(subjects.FEEDBACK, f"{subjects.FEEDBACK.lower()}.>", headers_only=True)
            ) as messages:
                async for message in messages:
                    nbytes = message.nbytes + OVERHEAD_BYTES
                    self._jobs.setdefault(message.subject.split(".")[1], _JobBytes()).add(message, nbytes)
                    self._bytes += nbytes if message.seq > self._looked_at else 0

    def has_room(self, job: str, key_id: str, nbytes: int) -> bool:
        """Return True if the API key ``key_id`` may store ``nbytes`` more bytes of feedback in ``job``."""
        if self._share >= 1 or not self._max_bytes:
            return True  # a full stream refuses the message itself
        of_job = self._jobs.get(job) or _JobBytes()
        own = min(of_job.used, self._bytes)
        of_key = min(of_job.by_sender[sender_number(key_id)], own)
        room = self._share * (self._max_bytes - max(0, self._bytes - own))
        return of_key + nbytes <= KEY_SHARE * (room - (own - of_key))

    async def _refresh(self) -> None:
        """Refresh the fill level of the stream, and stop counting messages that the stream has removed."""
        while True:
            try:
                state = await self._bus.stream_state(subjects.FEEDBACK)
                self._max_bytes, self._bytes, self._looked_at = state.max_bytes, state.bytes, state.last_seq
                for job in [name for name, its in self._jobs.items() if its.used > LOOKED_AT * state.max_bytes]:
                    await self._drop_removed(job, state.last_seq)
            except Unavailable as error:
                logger.info("shares of FEEDBACK are not known: %s", error)
            await asyncio.sleep(POLL_S)

    async def _drop_removed(self, job: str, last_seq: int) -> None:
        first = last_seq + 1
        scan = self._bus.scan(subjects.FEEDBACK, subjects.feedback(job), headers_only=True)
        async with contextlib.aclosing(scan) as messages:
            async for message in messages:
                first = message.seq
                break
        self._jobs[job].drop_before(first // PLACES)


class _JobBytes:
    """Bytes of one job in FEEDBACK, in total and by sender number (a hash of the API key). They are also counted in
    ranges of ``PLACES`` consecutive stream sequence numbers, so that ``drop_before`` can subtract removed messages.

    API keys map to at most NUM_SENDERS sender numbers, and a message has at most as many numbers as items.
    """

    def __init__(self) -> None:
        self.used = 0
        self.by_sender: Counter[int] = Counter()
        self._places: dict[int, tuple[int, Counter[int]]] = {}
        self._senders: dict[int, int] = {}
        """Bytes by sender number, from the header of the newest message's first part. The message's later parts have no
        such header; their bytes are divided among these senders."""

    def add(self, message: Message, nbytes: int) -> None:
        """Count a message with ``nbytes`` bytes."""
        if PART not in message.headers:
            self._senders = senders_of(message.headers)
        total = sum(self._senders.values()) or 1
        used, by_sender = self._places.get(message.seq // PLACES, (0, Counter[int]()))
        for sender, part in self._senders.items():
            by_sender[sender] += nbytes * part // total
            self.by_sender[sender] += nbytes * part // total
        self._places[message.seq // PLACES] = used + nbytes, by_sender
        self.used += nbytes

    def drop_before(self, first: int) -> None:
        """Stop counting messages in ranges before the range number ``first``."""
        for place in [place for place in self._places if place < first]:
            used, by_sender = self._places.pop(place)
            self.used -= used
            self.by_sender -= by_sender  # also deletes entries that reach 0
