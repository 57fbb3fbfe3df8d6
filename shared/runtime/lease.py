"""Leases that grant the right to write: compare-and-set entries in the ``leases`` bucket, with an increasing epoch.

A lease is taken over after *observed silence*: a process that saw the entry unchanged for the length of the lease, on
its own monotonic clock, may replace it. No clocks are compared between hosts, and the store does not expire entries:
expiry by the server sends no event, has a resolution of a second, and leaves markers that block a new entry. Time
during which the bus was unreachable does not count as silence, because the holder could not renew either.

The epoch rises with every acquisition and is part of everything the holder writes. Receivers reject lower epochs, so a
holder that was suspended and resumes late does no harm.

The holder renews its lease in a separate thread, over a separate connection: work that blocks the event loop for
seconds does not lose the lease. A suspended process renews nothing, and if its event loop does not run for ``HUNG_S``,
the process is considered dead: its thread ends the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time

import msgspec

from penstock.shared.errors import Conflict, DeadlineError, Fenced, Unavailable
from penstock.shared.protocol.subjects import LEASES
from penstock.shared.transport.bus import Bus, Entry

__all__ = ["Lease", "LeaseRecord"]

log = logging.getLogger(__name__)

HUNG_S = 30.0
"""Time without activity of the event loop after which the process loses the lease (seconds)."""
CONNECT_S = 2.0


class LeaseRecord(msgspec.Struct, frozen=True):
    """Value of a lease's entry in the bucket. ``holder`` is empty after a release."""

    holder: str
    epoch: int
    lease_s: float


class Lease:
    """Lease of one holder: call ``acquire``, run ``keep`` while the work runs, then call ``release``.

    ``held`` and ``check`` may be called from any thread. ``hung_s``: see ``HUNG_S``.
    """

    def __init__(self, bus: Bus, key: str, *, holder: str, lease_s: float, hung_s: float = HUNG_S) -> None:
        self.key = key
        self.holder = holder
        self.lease_s, self.hung_s = lease_s, hung_s
        self.epoch = 0
        self._beat = 0.0
        self._bus = bus
        self._kv = bus.kv(LEASES)
        self._revision = 0
        self._renewed = 0.0
        self._held = False

    @property
    def held(self) -> bool:
        """True if this process holds the lease, and renewed it recently enough that no other process can have taken
        it."""
        return self._held and time.monotonic() - self._renewed < self.lease_s

    def check(self) -> None:
        """Raise Fenced unless the lease is still held."""
        if not self.held:
            raise Fenced(f"lease '{self.key}' is not held any more by '{self.holder}' (epoch {self.epoch})")

    async def acquire(self, deadline_s: float | None = None) -> int:
        """Wait until this process holds the lease; return its epoch, higher than any before.

        A lease that was released, or that names this holder (after a restart), is taken at once.

        Raises:
            DeadlineError: another process held the lease until the deadline; without a deadline the wait has no limit.
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
        """Renew the lease three times per lease length, in a thread, until the lease is lost or this call is cancelled.

        Raises:
            Fenced: another process holds the lease, or it was not renewed in time. The holder must stop writing.
        """
        self.check()
        self._beat = time.monotonic()
        renewing = _Renewing(self, self._bus)
        renewing.start()
        try:
            while not renewing.over.done():
                self._beat = time.monotonic()
                pause_s = min(1.0, self.hung_s / 4)
                if not renewing.connected:  # on a busy host this may take longer than the lease
                    pause_s = min(pause_s, self.lease_s / 5)
                    await self._renew_meanwhile()
                await asyncio.wait({renewing.over}, timeout=pause_s)
        finally:
            await renewing.stop()
        self.check()
        raise Fenced(f"lease '{self.key}' is not renewed any more: {renewing.reason}")

    async def _renew_meanwhile(self) -> None:
        """Renew the lease over the holder's own connection if a renewal is due. This bridges the time until the
        renewing thread has connected.

        Raises Fenced.
        """
        if time.monotonic() - self._renewed < self.lease_s / 3:
            return
        try:
            await self.renew()
        except Unavailable as error:
            log.warning("lease '%s' could not be renewed: %s", self.key, error)

    async def renew_until_lost(self, bus: Bus) -> None:
        """Renew the lease three times per lease length over ``bus``. Raises Fenced once the lease is lost."""
        while True:
            self.check()
            await asyncio.sleep(self.lease_s / 3)
            silent_s = time.monotonic() - self._beat
            if silent_s > self.hung_s:
                self._held = False
                raise Fenced(f"the event loop of '{self.holder}' gave no sign for {silent_s:.1f} s")
            try:
                await self.renew(bus)
            except Unavailable as error:
                log.warning("lease '%s' could not be renewed: %s", self.key, error)

    async def renew(self, bus: Bus | None = None) -> None:
        """Renew the lease once: write its entry again, over ``bus`` or, by default, over the holder's own connection.

        Raises:
            Fenced: another process wrote to the entry, or the lease had expired.
            Unavailable: the bus did not answer while the lease was valid.
        """
        self.check()
        asked = time.monotonic()
        left_s = self.lease_s - (asked - self._renewed)
        kv = self._kv if bus is None else bus.kv(LEASES)
        try:
            self._revision = await kv.update(self.key, self._encode(), self._revision, deadline_s=left_s)
        except Conflict:
            entry = await kv.get(self.key, deadline_s=max(left_s, 0.1))
            record = _decode(entry)
            if entry is None or (record.holder, record.epoch) != (self.holder, self.epoch):
                self._held = False
                raise Fenced(
                    f"lease '{self.key}' was taken by '{record.holder}' (epoch {record.epoch} > {self.epoch})"
                ) from None
            self._revision = entry.revision  # an own renewal whose response was lost
        self._renewed = asked

    async def release(self) -> None:
        """Release the lease so that the next holder need not wait. No error is raised if the lease is lost or the bus
        does not answer."""
        if not self._held:
            return
        self._held = False
        empty = msgspec.json.encode(LeaseRecord("", self.epoch, self.lease_s))
        try:
            try:
                await self._kv.update(self.key, empty, self._revision, deadline_s=1.0)
            except Conflict:  # a cancelled renewal may be stored nevertheless
                entry = await self._kv.get(self.key, deadline_s=1.0)
                record = _decode(entry)
                if entry is None or (record.holder, record.epoch) != (self.holder, self.epoch):
                    raise
                await self._kv.update(self.key, empty, entry.revision, deadline_s=1.0)
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


class _Renewing:
    """Thread that renews one lease. When the thread stops, the future ``over`` completes, and ``reason`` has the
    cause."""

    def __init__(self, lease: Lease, bus: Bus) -> None:
        self._lease, self._bus = lease, bus
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.reason = "it was released"
        self.connected = False
        self._lock = threading.Lock()
        self._inside: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._stopped = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name=f"lease {self._lease.key}", daemon=True).start()

    async def stop(self) -> None:
        """Stop the thread and wait until it has stopped, even if this task is cancelled during the wait."""
        with self._lock:
            self._stopped = True
            if self._inside is not None:
                loop, task = self._inside
                loop.call_soon_threadsafe(task.cancel)
        while not self.over.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({self.over})

    def _run(self) -> None:
        try:
            asyncio.run(self._renew())
        except Exception as error:  # after any error the lease is not renewed: notify the holder
            log.exception("the thread that renews lease '%s' failed", self._lease.key)
            self._end(str(error))

    async def _renew(self) -> None:
        task = asyncio.create_task(self._renew_over_own_bus())
        with self._lock:
            self._inside = asyncio.get_running_loop(), task
            if self._stopped:
                task.cancel()
        await asyncio.wait({task})
        with self._lock:
            self._inside = None
        self._end(self.reason)  # a task cancelled before it began did not call _end itself
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _renew_over_own_bus(self) -> None:
        bus: Bus | None = None
        try:
            while bus is None:
                self._lease.check()
                with contextlib.suppress(Unavailable):
                    bus = await self._bus.another(name=f"lease {self._lease.key}", deadline_s=CONNECT_S)
            self.connected = True
            await self._lease.renew_until_lost(bus)
        except Fenced as error:
            self.reason = str(error)
        finally:
            self._end(self.reason)
            if bus is not None:
                await bus.close(0.5)

    def _end(self, reason: str) -> None:
        def end() -> None:
            self.reason = reason
            if not self.over.done():
                self.over.set_result(None)

        with contextlib.suppress(RuntimeError):  # the loop of the holder is closed, so no task waits
            self._loop.call_soon_threadsafe(end)


class _Silence:
    """Measures how long the entry of a lease has stayed unchanged while this process could read it.

    An interruption (the bus was unreachable, this process was suspended) restarts the measurement.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._what: tuple[int, int] = (-1, -1)
        self._since = self._before = 0.0

    def observe(self, entry: Entry | None, reconnects: int, asked: float) -> float:
        """Return for how many seconds ``entry`` has been observed unchanged. ``asked``: time at which the read of
        ``entry`` began."""
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
