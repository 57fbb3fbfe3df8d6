"""The ledger on the bus: reads it, appends to it as its only writer, stores snapshots of the state that its entries add
up to, and archives old entries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

from penstock.services.coordinator.training.decision import copy_state
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.snapshot import Snapshot, decode_snapshot, digest_of, encode_snapshot
from penstock.shared.errors import ConfigError, Conflict, Fenced, ProtocolError, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Event, PhaseChanged, decode_events, encode_events
from penstock.shared.protocol.jobs import JobFailure
from penstock.shared.runtime.ledger import (
    ARCHIVED,
    LedgerArchive,
    LedgerEntry,
    Segment,
    encode_segment,
    newest_segment,
    read_ledger,
    segment_of,
)
from penstock.shared.transport.bus import Bus, Message, Outgoing

__all__ = ["Journal", "archive_whole", "read_snapshots"]

logger = logging.getLogger(__name__)

SNAPSHOT_ENTRIES = 256
"""Number of entries after which a snapshot is due, if their bytes have reached the size of the last snapshot. So
snapshots write no more bytes than entries do, and a leader reads few entries in addition to the newest snapshot."""
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 64 << 10, 16 << 20
SEGMENT_SHARE = 256
"""A running job archives entries that its snapshots cover once they exceed 1/SEGMENT_SHARE of LEDGER. This threshold
is at least ``MIN_SEGMENT_BYTES`` and at most ``MAX_SEGMENT_BYTES``."""
JOB_SHARE = 8
"""A job whose entries take more than 1/JOB_SHARE of LEDGER must archive old entries before it appends a new one."""
RESERVED_SHARE = 0.97
"""Fill level of LEDGER above which a job with many bytes in LEDGER must archive old entries before it appends a new
one. The remaining space is for entries that name segments of the archive."""
ENTRY_BYTES = 250
"""Bytes that an entry takes in LEDGER in addition to the bytes of its events."""
WRITER = "Penstock-Writer"
"""Header with the id of the writer, by which a leader tells its own entry from another leader's entry of equal
content."""
FREE_EVERY_S, LOOK_EVERY_S = 5.0, 1.0
KEEP = 2
"""Number of newest snapshots that are kept; the second newest is used if the newest cannot be verified."""


class Journal:
    """Append-only event log of one job with a single writer.

    An append states the stream sequence number of the last entry that the writer knows. A refused or timed-out append
    is resolved by reading the tail: the writer's own entry there means success, a foreign one means that another
    coordinator leads (Fenced).

    Args:
        retry: repeats appends that the bus refuses, and reports the wait.
        archive: receives old entries, so that LEDGER, which all jobs share, does not fill; None: they stay in LEDGER.
    """

    def __init__(self, bus: Bus, job: str, retry: Retry | None = None, *, archive: LedgerArchive | None = None) -> None:
        self._bus, self._job, self._archive = bus, job, archive
        self.retry = retry or Retry(job)
        self._subject = subjects.ledger(job)
        self._last_seq = 0
        self._last_data = b""
        self._entries = self._bytes = self._snapshot_bytes = 0  # since the last snapshot; size of that
        self._writer = secrets.token_hex(8)
        self._segment: Segment | None = None  # the newest one that an entry names
        self._written: Segment | None = None  # stored; the next entry will name it
        self._purged = 0  # number of the newest segment whose entries are purged
        self._held = self._budget = 0  # bytes of this job in LEDGER (last known), and its limit
        self._looked = self._tried = float("-inf")
        self._is_crowded = False
        self._upkeep_due = True
        self._archiving = asyncio.Lock()

    @property
    def last_seq(self) -> int:
        """Stream sequence number of the newest ledger entry, or 0 if there is none."""
        return self._last_seq

    async def load(self) -> LedgerState:
        """Return the fold of the whole ledger: the newest snapshot that can be verified, and the entries after it.

        A snapshot that cannot be verified is ignored; without one the fold starts at the first entry.

        Raises:
            ArchiveError: no snapshot can be verified, and a segment of the archive is missing or was changed.
        """
        self._written = None
        for snapshot, state, nbytes in await read_snapshots(self._bus, self._job):
            tail = await self._bus.read(subjects.LEDGER, self._subject, start_seq=snapshot.seq)
            if not tail or tail[0].seq != snapshot.seq or digest_of(tail[0].data) != snapshot.entry:
                logger.warning("%s: the snapshot of entry %d is of another ledger; ignored", self._job, snapshot.seq)
                continue
            self._snapshot_bytes, self._segment = nbytes, newest_segment(tail, self._job)
            last = LedgerEntry(tail[0].seq, tail[0].data)
            try:
                return await asyncio.to_thread(self._fold, state, [LedgerEntry(m.seq, m.data) for m in tail[1:]], last)
            except (AssertionError, KeyError) as error:
                logger.error("%s: the snapshot of entry %d is wrong (%r); ignored", self._job, snapshot.seq, error)
        entries = await read_ledger(self._bus, self._job, self._archive)
        newest = await self._bus.last(subjects.LEDGER, self._subject)
        self._segment = newest_segment([newest], self._job) if newest is not None else None
        return await asyncio.to_thread(self._fold, LedgerState(), entries, None)

    def _fold(self, state: LedgerState, tail: Sequence[LedgerEntry], last: LedgerEntry | None) -> LedgerState:
        for entry in tail:
            fold(decode_events(entry.data), state)
            last = entry
        self._entries, self._bytes = len(tail), sum(len(entry.data) for entry in tail)
        if last is not None:
            self._last_seq, self._last_data = last.seq, last.data
        return state

    def failure(self) -> JobFailure | None:
        """Return the failure with which the newest ledger entry ended the job, or None if that entry records no
        failure."""
        events = decode_events(self._last_data) if self._last_data else []
        for event in events:
            if isinstance(event, PhaseChanged) and event.phase == "failed" and event.code:
                fields = {"code": event.code, "message": event.reason, "service": event.service or None}
                return JobFailure.model_validate(fields)
        return None

    async def append(self, events: Sequence[Event]) -> int:
        """Commit one decision as a ledger entry; return the entry's stream sequence number.

        Waits while the bus is away, or while LEDGER or the job's share of it is full (the caller is cancelled when it
        loses its lease).

        Raises:
            Fenced: another writer appended.
        """
        data = encode_events(events)
        seq = await self.retry.until_taken("an entry of the ledger", self._subject, lambda: self._append_within(data))
        self._last_seq, self._last_data = seq, data
        return seq

    async def _append_within(self, data: bytes) -> int:
        """Append one entry; first archive old entries if the job's share of LEDGER, or LEDGER itself, is full."""
        if self._archive is None:
            return await self._append(data)
        await self._refresh_fill_level()
        if self._held + len(data) > self._budget:
            await self._free(f"{self._held} bytes of {subjects.LEDGER} are of this job, which may have {self._budget}")
        elif self._is_crowded and self._held > MIN_SEGMENT_BYTES:
            await self._free(f"stream {subjects.LEDGER} is nearly full")
        try:
            return await self._append(data)
        except StreamFull as error:
            await self._free(str(error))
            return await self._append(data)

    async def _refresh_fill_level(self) -> None:
        """Refresh the fill level of LEDGER, at most once per LOOK_EVERY_S."""
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            state = await self._bus.stream_state(subjects.LEDGER)
            self._looked, self._budget = time.monotonic(), max(state.max_bytes // JOB_SHARE, MIN_SEGMENT_BYTES)
            self._is_crowded = state.bytes > RESERVED_SHARE * state.max_bytes

    async def _append(self, data: bytes) -> int:
        named = self._written or self._segment
        headers = {WRITER: self._writer} | ({ARCHIVED: named.name} if named is not None else {})
        try:
            seq = await self._bus.publish(
                self._subject, data, headers=headers, expect_last_subject_seq=self._last_seq, deadline_s=5
            )
        except Conflict as error:
            own = await self._resolve(data)
            if own is None:
                raise Unavailable(f"{error}, and what it wrote cannot be read yet") from None
            seq, named = own.seq, segment_of(own.headers, self._job)
        if named != self._segment:
            self._segment, self._upkeep_due = named, True
            if named == self._written:
                self._written = None
        self._entries, self._bytes = self._entries + 1, self._bytes + len(data)
        self._held += len(data) + ENTRY_BYTES
        return seq

    async def _resolve(self, data: bytes) -> Message | None:
        """Return the ledger entry directly after ``last_seq`` if this writer appended it, or None if there is no entry
        after ``last_seq``.

        Raises:
            Fenced: another writer appended that entry.
        """
        tail = await self._bus.read(subjects.LEDGER, self._subject, start_seq=self._last_seq + 1)
        if not tail:
            return None
        if tail[0].data == data and tail[0].headers.get(WRITER, self._writer) == self._writer:
            return tail[0]
        raise Fenced(f"{self._subject}: entry {tail[0].seq} was written by somebody else; stepping down")

    # -- the archive -------------------------------------------------------------------------------------------------

    def upkeep(self) -> Callable[[], Awaitable[None]] | None:
        """Return background work that archives old entries and purges archived ones from LEDGER, or None if none is
        due."""
        if self._archive is None or not self._upkeep_due:
            return None
        self._upkeep_due = False
        return self.keep_up

    async def keep_up(self) -> None:
        """Purge archived entries from LEDGER, and write the next segment of the archive. Raises Unavailable.

        An entry counts as archived once a ledger entry names its segment or a later one.
        """
        try:
            await self._purge()
            await self.archive()
        except Unavailable:
            self._upkeep_due = True
            raise
        except OSError as error:
            logger.error("%s: the ledger is not archived: %s", self._job, error)

    async def archive(self, *, below: int | None = None, least: int | None = None) -> None:
        """Write the next segment of the archive, which the next ledger entry will name.

        The segment holds entries below the stream sequence number ``below``, by default those that the second newest
        snapshot covers, if it can be verified. Nothing is written if the entries have fewer than ``least`` bytes.

        Raises:
            OSError: the archive cannot be written.
            Unavailable: the bus does not answer.
        """
        async with self._archiving:
            if self._archive is None or self._written is not None:
                return
            if least is None:
                size = (await self._bus.stream_state(subjects.LEDGER)).max_bytes
                least = min(max(size // SEGMENT_SHARE, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)
            stop = await self._covered(KEEP) if below is None else below
            entries = await self._old_entries(stop)
            if sum(len(entry.data) + ENTRY_BYTES for entry in entries) < least or not entries:
                return
            segment, data = await asyncio.to_thread(encode_segment, self._job, entries, self._segment)
            await asyncio.to_thread(self._archive.put, self._job, segment.name, data)
            self._written = segment
            logger.info("%s: entries up to %d are archived as %s", self._job, segment.last_seq, segment.name)

    async def _old_entries(self, stop: int) -> list[LedgerEntry]:
        """Return the oldest entries of LEDGER below ``stop`` that no segment holds.

        Also record the bytes of all entries that no segment holds, below ``stop`` or not.
        """
        start = self._segment.last_seq + 1 if self._segment is not None else 1
        entries, taken, held = list[LedgerEntry](), 0, 0
        async with contextlib.aclosing(self._bus.scan(subjects.LEDGER, self._subject, start_seq=start)) as messages:
            async for message in messages:
                size = len(message.data) + ENTRY_BYTES
                held += size
                if message.seq < stop and taken < MAX_SEGMENT_BYTES:
                    entries.append(LedgerEntry(message.seq, message.data))
                    taken += size
        self._held = held
        return entries

    async def _purge(self) -> None:
        if self._segment is not None and self._segment.number > self._purged and not self._bus.held:
            await self._bus.purge(subjects.LEDGER, self._subject, below_seq=self._segment.last_seq + 1)
            self._purged = self._segment.number

    async def _free(self, why: str) -> None:
        """Archive old entries, name their segment in a ledger entry without events, and purge the archived entries.

        Raises:
            StreamFull: nothing can be archived now; the message includes ``why``, the reason that room is needed.
        """
        if time.monotonic() - self._tried < FREE_EVERY_S:
            raise StreamFull(why)
        self._tried = time.monotonic()
        try:
            await self.archive(below=await self._covered(1), least=1)
            await self.archive(below=self._last_seq, least=1)
        except OSError as error:
            if isinstance(error, Unavailable):
                raise
            raise StreamFull(f"{why}, and its archive cannot be written: {error}") from None
        if self._written is None:
            raise StreamFull(why)
        await self.name_segment()
        self._tried = self._looked = float("-inf")

    async def resume(self) -> int:
        """Find the end of the ledger without reading all of it; return the stream sequence number of the last entry, 0
        if there is none."""
        newest = await self._bus.last(subjects.LEDGER, self._subject)
        if newest is not None:
            self._last_seq, self._last_data = newest.seq, newest.data
            self._segment = newest_segment([newest], self._job)
        return self._last_seq

    async def name_segment(self) -> bool:
        """Append an entry without events that names the written segment, and purge the segment's entries from LEDGER.

        Return False if an entry already names every written segment. Raises Fenced as ``append`` does, and Unavailable
        instead of waiting.
        """
        if self._written is None:
            return False
        data = encode_events([])
        self._last_seq, self._last_data = await self._append(data), data
        await self._purge()
        await self._old_entries(0)
        return True

    async def _covered(self, place: int) -> int:
        """Return the stream sequence number of the last ledger entry that the ``place``-th newest snapshot covers; 0 if
        there is no such snapshot, or if it cannot be verified."""
        begun = await _begun(self._bus, self._job)
        for message in (await self._bus.get_whole(subjects.SNAPSHOTS, begun[-place:][:1])).values():
            if len(begun) < place:
                break
            try:
                snapshot, _ = await asyncio.to_thread(decode_snapshot, message.data, job=self._job)
            except ProtocolError as error:
                logger.warning("%s: a snapshot cannot be verified: %s", self._job, error)
                break
            found = await self._bus.read(subjects.LEDGER, self._subject, start_seq=snapshot.seq, end_seq=snapshot.seq)
            return snapshot.seq if found and digest_of(found[0].data) == snapshot.entry else 0
        return 0

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, state: LedgerState) -> Callable[[], Awaitable[None]] | None:
        """Return work that stores a snapshot of ``state``, which must include all entries of the ledger. Return None if
        no snapshot is due."""
        if self._entries < SNAPSHOT_ENTRIES or self._bytes < self._snapshot_bytes:
            return None
        self._entries = self._bytes = 0
        copy, seq, entry = copy_state(state), self._last_seq, digest_of(self._last_data)
        return lambda: self._write(copy, seq, entry)

    async def _write(self, state: LedgerState, seq: int, entry: str) -> None:
        data = await asyncio.to_thread(encode_snapshot, state, job=self._job, seq=seq, entry=entry)
        self._snapshot_bytes = len(data)
        subject = subjects.snapshots(self._job)
        message = Outgoing(subject, data, msg_id=f"snapshot:{self._job}:{seq}:{state.epoch}")
        try:
            await self._bus.publish_whole([message], deadline_s=10)
        except (ConfigError, ProtocolError) as error:  # too large for this server: leaders fold more entries
            logger.warning("%s: the snapshot of entry %d is not stored: %s", self._job, seq, error)
            return
        self._upkeep_due = True
        begun = await _begun(self._bus, self._job)
        if len(begun) > KEEP:
            await self._bus.purge(subjects.SNAPSHOTS, subject, below_seq=begun[-KEEP])


async def archive_whole(bus: Bus, job: str, archive: LedgerArchive, *, least: int) -> None:
    """Move the ledger of a job without a leader to the archive, if LEDGER has at least ``least`` bytes of it.

    Raises:
        OSError: the archive cannot be written.
        Unavailable: the bus does not answer.
        Fenced: another writer appended.
    """
    journal = Journal(bus, job, archive=archive)
    end = await journal.resume()
    while True:
        await journal.archive(below=end + 1, least=least)
        if not await journal.name_segment():
            return
        least = 1


async def read_snapshots(bus: Bus, job: str) -> list[tuple[Snapshot, LedgerState, int]]:
    """Return a job's snapshots that decode and match their digest, each with its state and size (bytes), newest first.

    The caller must check that the ledger has the entry that a snapshot names.
    """
    found = []
    for seq, message in (await bus.get_whole(subjects.SNAPSHOTS, await _begun(bus, job))).items():
        try:
            found.append((*decode_snapshot(message.data, job=job), len(message.data)))
        except ProtocolError as error:
            logger.warning("%s: snapshot %d is ignored: %s", job, seq, error)
    return sorted(found, key=lambda one: one[0].seq, reverse=True)


async def _begun(bus: Bus, job: str) -> list[int]:
    """Return the stream sequence number of each snapshot of a job in SNAPSHOTS (that of its first message), oldest
    first."""
    return [m.seq for m in await bus.read(subjects.SNAPSHOTS, subjects.snapshots(job), headers_only=True)]
