"""The right to write: a compare-and-set lease in the ``leases`` bucket, with an epoch that only grows.

A lease is taken over by *observed silence*: whoever saw the entry unchanged for the lease's length on its own
monotonic clock may replace it. No clocks are compared between hosts, and the store expires nothing: an expiry that the
server does is silent, no shorter than a second, and leaves markers that refuse a new entry. Time during which the bus
was away does not count as silence, for then the holder could not speak either.

The epoch goes up with every acquisition and stands in everything the holder writes. Receivers refuse lower ones, so a
holder that was stopped and wakes up late does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from penstock.shared.errors import Conflict, DeadlineError, Fenced, Unavailable
from penstock.shared.protocol.subjects import LEASES
from penstock.shared.transport.bus import Bus, Entry

__all__ = ["Lease", "LeaseRecord"]

log = logging.getLogger(__name__)


class LeaseRecord(msgspec.Struct, frozen=True):
    """Content of the bucket. ``holder`` is empty after a release."""

    holder: str
    epoch: int
    lease_s: float


class Lease:
    """One lease, for one holder. ``acquire``, then run ``keep`` beside the work, then ``release``."""

    def __init__(self, bus: Bus, key: str, *, holder: str, lease_s: float) -> None:
        self.key = key
        self.holder = holder
        self.lease_s = lease_s
        self.epoch = 0
        self._bus = bus
        self._kv = bus.kv(LEASES)
        self._revision = 0
        self._renewed = 0.0
        self._held = False

    @property
    def held(self) -> bool:
        """True if the lease is held and was renewed recently enough that nobody else can have it."""
        return self._held and time.monotonic() - self._renewed < self.lease_s

    def check(self) -> None:
        """Raise Fenced unless ``held``."""
        if not self.held:
            raise Fenced(f"lease '{self.key}' is not held any more by '{self.holder}' (epoch {self.epoch})")

    async def acquire(self, deadline_s: float | None = None) -> int:
        """Wait until the lease is ours; returns its epoch, higher than any before.

        A released lease and our own (a process that restarted under the same name) are taken at once.

        Raises:
            DeadlineError: somebody else held it until the deadline; without a deadline it waits for ever.
        """
        start = time.monotonic()
        silence = _Silence(longest_gap_s=self.lease_s / 2)
        holder = "nobody"
        while True:
            asked = time.monotonic()
            try:
                entry = await self._kv.get(self.key, deadline_s=max(self.lease_s, 1.0))
                record = _decode(entry)
                holder = record.holder
                silent_s = silence.observe(entry, self._bus.reconnects, asked)
                free = record.holder in ("", self.holder) or silent_s >= max(self.lease_s, record.lease_s)
                if free and await self._take(entry, record):
                    return self.epoch
            except Unavailable as error:
                log.warning("lease '%s' waits for the bus: %s", self.key, error)
            if deadline_s is not None and time.monotonic() - start > deadline_s:
                raise DeadlineError(f"lease '{self.key}' is held by '{holder}'; waited {deadline_s:g} s for it")
            await asyncio.sleep(min(self.lease_s / 5, 0.5))

    async def keep(self) -> None:
        """Renew three times per lease length until the lease is lost or this is cancelled.

        Raises:
            Fenced: somebody else has it, or it could not be renewed in time. The holder must stop writing.
        """
        while True:
            self.check()
            await asyncio.sleep(self.lease_s / 3)
            try:
                await self.renew()
            except Unavailable as error:
                log.warning("lease '%s' could not be renewed: %s", self.key, error)

    async def renew(self) -> None:
        """Write the entry once more.

        Raises:
            Fenced: somebody else wrote to it, or it ran out before.
            Unavailable: the bus did not answer while the lease was valid.
        """
        self.check()
        asked = time.monotonic()
        left_s = self.lease_s - (asked - self._renewed)
        try:
            self._revision = await self._kv.update(self.key, self._encode(), self._revision, deadline_s=left_s)
        except Conflict:
            entry = await self._kv.get(self.key, deadline_s=max(left_s, 0.1))
            record = _decode(entry)
            if entry is None or (record.holder, record.epoch) != (self.holder, self.epoch):
                self._held = False
                raise Fenced(
                    f"lease '{self.key}' was taken by '{record.holder}' (epoch {record.epoch} > {self.epoch})"
                ) from None
            self._revision = entry.revision  # our own renewal whose answer was lost
        self._renewed = asked

    async def release(self) -> None:
        """Give it up so that the next holder need not wait. Never raises for a lease that is lost already."""
        if not self._held:
            return
        self._held = False
        empty = msgspec.json.encode(LeaseRecord("", self.epoch, self.lease_s))
        try:
            await self._kv.update(self.key, empty, self._revision, deadline_s=1.0)
        except (Conflict, Unavailable) as error:
            log.info("lease '%s' was not released: %s", self.key, error)

    async def _take(self, entry: Entry | None, record: LeaseRecord) -> bool:
        asked = time.monotonic()
        self.epoch = record.epoch + 1
        try:
            if entry is None:
                self._revision = await self._kv.create(self.key, self._encode(), deadline_s=self.lease_s)
            else:
                self._revision = await self._kv.update(
                    self.key, self._encode(), entry.revision, deadline_s=self.lease_s
                )
        except Conflict:
            return False
        self._renewed, self._held = asked, True
        return True

    def _encode(self) -> bytes:
        return msgspec.json.encode(LeaseRecord(self.holder, self.epoch, self.lease_s))


class _Silence:
    """How long an entry was watched without a gap and without a change.

    A gap in watching (the bus was away, this process was stopped) starts it anew.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._what: tuple[int, int] = (-1, -1)
        self._since = self._before = 0.0

    def observe(self, entry: Entry | None, reconnects: int, asked: float) -> float:
        """Seconds between the first sight of this revision and ``asked``, when the newest look began."""
        now = time.monotonic()
        what = (entry.revision if entry is not None else 0, reconnects)
        if what != self._what or now - self._before > self._longest_gap_s:
            self._what, self._since = what, now
        self._before = now
        return asked - self._since


def _decode(entry: Entry | None) -> LeaseRecord:
    if entry is None or entry.value is None:
        return LeaseRecord("", 0, 0.0)
    return msgspec.json.decode(entry.value, type=LeaseRecord)
