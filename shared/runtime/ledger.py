"""Reader of a job's complete ledger: first the archived segments, then the entries that remain in the stream LEDGER.

The writer of a ledger moves old entries from the stream to segments::

    segment written and fsync'd ──► named by the next entry (compare-and-set) ──► its entries purged from the stream

Every later entry has the newest segment's name in its header ``ARCHIVED``. A segment's name contains its SHA-256, and
each segment names its predecessor, so that the newest entry determines every byte of the archive. A replaced writer may
leave a segment behind that no entry names; such a segment is never read.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import struct
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.shared.errors import ArchiveError, NotFound
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus, Message

__all__ = [
    "ARCHIVED",
    "FileArchive",
    "LedgerArchive",
    "LedgerEntry",
    "Segment",
    "encode_segment",
    "ledger_archive",
    "newest_segment",
    "read_ledger",
    "scan_ledger",
    "segment_of",
]

ARCHIVED = "Penstock-Archived"
"""Header of a ledger entry: name of the newest segment in the archive when the entry was written."""
MAGIC = b"penstock ledger segment 1\n"
FOLDER = "ledgers"
_NAME = re.compile(r"([0-9]{8})-([0-9]{1,20})-([0-9a-f]{64})", re.ASCII)
_RECORD = struct.Struct(">QI")
"""Prefix of each entry in a segment: its stream sequence number in LEDGER and its length in bytes."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Encoded events of one decision, with their stream sequence number in LEDGER."""

    seq: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """The ``number``-th segment of a ledger, from 1; its last entry has the stream sequence number ``last_seq``."""

    number: int
    last_seq: int
    digest: str

    @property
    def name(self) -> str:
        """Name of the segment in the archive."""
        return f"{self.number:08d}-{self.last_seq}-{self.digest}"


class LedgerArchive(Protocol):
    """Storage of segments. Methods block: call them off the event loop."""

    def put(self, job: str, name: str, data: bytes) -> None:
        """Store a segment durably. Raises OSError."""

    def get(self, job: str, name: str) -> bytes:
        """Return the bytes of a segment. Raises NotFound if there is no such segment, and OSError if it cannot be
        read."""

    def delete(self, job: str) -> None:
        """Delete all segments of a job, if any. Raises OSError."""


class FileArchive:
    """Segments as files ``FOLDER/JOB/NAME``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, job: str, name: str, data: bytes) -> None:
        """Store a segment durably, as ``LedgerArchive.put`` describes."""
        folder = self._folder / job
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.{os.getpid()}.part"
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.rename(folder / name)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        for each in (folder, self._folder, self._folder.parent):
            _sync(each)

    def get(self, job: str, name: str) -> bytes:
        """Return the bytes of a segment, as ``LedgerArchive.get`` describes."""
        try:
            return (self._folder / job / name).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"{self._folder / job} has no file {name}") from None

    def delete(self, job: str) -> None:
        """Delete all segments of a job, as ``LedgerArchive.delete`` describes."""
        if (self._folder / job).is_dir():
            shutil.rmtree(self._folder / job)


def ledger_archive(data_dir: Path) -> LedgerArchive:
    """Return the archive of a deployment's ledgers."""
    return FileArchive(data_dir / FOLDER)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def segment_of(headers: Mapping[str, str], job: str) -> Segment | None:
    """Return the archived segment to which the headers of a ledger entry refer; None if they refer to none."""
    text = headers.get(ARCHIVED)
    if text is None:
        return None
    found = _NAME.fullmatch(text)
    if found is None:
        raise ArchiveError(f"an entry of the ledger of job '{job}' names no segment: '{text[:120]}'")
    return Segment(int(found[1]), int(found[2]), found[3])


def newest_segment(messages: Iterable[Message], job: str) -> Segment | None:
    """Return the newest segment to which the headers of ledger entries refer; None if they refer to none."""
    found = (segment_of(message.headers, job) for message in messages)
    return max((segment for segment in found if segment is not None), key=lambda one: one.number, default=None)


def encode_segment(job: str, entries: Sequence[LedgerEntry], before: Segment | None) -> tuple[Segment, bytes]:
    """Build a segment from ``entries`` (at least one); return the segment and its bytes. ``before`` is the preceding
    segment; None: this is the first one."""
    header = {"job": job, "number": before.number + 1 if before else 1, "before": before.name if before else ""}
    records = (_RECORD.pack(entry.seq, len(entry.data)) + entry.data for entry in entries)
    data = b"".join([MAGIC, msgspec.json.encode(header), b"\n", *records])
    number = before.number + 1 if before else 1
    return Segment(number, entries[-1].seq, hashlib.sha256(data).hexdigest()), data


def decode_segment(job: str, segment: Segment, data: bytes) -> list[LedgerEntry]:
    """Return the entries of a segment, verified against its name. Raises ArchiveError."""
    if hashlib.sha256(data).hexdigest() != segment.digest:
        raise ArchiveError(
            f"segment {segment.number} of the ledger of job '{job}' was changed: it does not hash to its name "
            f"({segment.name}); restore it from a backup"
        )
    place = data.index(b"\n", len(MAGIC)) + 1
    entries: list[LedgerEntry] = []
    while place < len(data):
        seq, size = _RECORD.unpack_from(data, place)
        place += _RECORD.size
        entries.append(LedgerEntry(seq, data[place : place + size]))
        place += size
    return entries


def _before(job: str, segment: Segment, data: bytes) -> Segment | None:
    """Return the preceding segment, to which the header of ``segment`` refers; None for the first segment."""
    header = msgspec.json.decode(data[len(MAGIC) : data.index(b"\n", len(MAGIC))])
    before = segment_of({ARCHIVED: header["before"]}, job) if header["before"] else None
    if header["job"] != job or (before.number if before else 0) != segment.number - 1:
        raise ArchiveError(f"segment {segment.number} of the ledger of job '{job}' is of another ledger")
    return before


def _fetch(archive: LedgerArchive | None, job: str, segment: Segment) -> bytes:
    what = f"segment {segment.number} of the ledger of job '{job}'"
    if archive is None:
        raise ArchiveError(f"{what} stands in an archive, and this process has none")
    try:
        return archive.get(job, segment.name)
    except NotFound as error:
        raise ArchiveError(f"{what} is missing: {error}; restore it from a backup") from None
    except OSError as error:
        raise ArchiveError(f"{what} cannot be read: {error}") from None


def _chain(archive: LedgerArchive | None, job: str, newest: Segment) -> list[Segment]:
    """Return all segments up to ``newest``, in order, after verification of each segment's digest."""
    found = [newest]
    while True:
        data = _fetch(archive, job, found[-1])
        decode_segment(job, found[-1], data)
        before = _before(job, found[-1], data)
        if before is None:
            return found[::-1]
        found.append(before)


async def scan_ledger(
    bus: Bus, job: str, archive: LedgerArchive | None, *, end_seq: int | None = None
) -> AsyncGenerator[LedgerEntry, None]:
    """Yield every entry of a job's ledger, in order, up to its current end or ``end_seq``; at most one segment is in
    memory.

    Raises:
        ArchiveError: a segment is missing or was changed; the message names it.
        Unavailable: the bus does not answer.
    """
    # A purge during this read follows an entry that names the segment with the purged entries; that entry is read, too.
    messages: list[Message] = await bus.read(subjects.LEDGER, subjects.ledger(job), end_seq=end_seq)
    newest = newest_segment(messages, job)
    if newest is not None:
        for segment in await asyncio.to_thread(_chain, archive, job, newest):
            data = await asyncio.to_thread(_fetch, archive, job, segment)
            for entry in await asyncio.to_thread(decode_segment, job, segment, data):
                yield entry
    for message in messages:
        if newest is None or message.seq > newest.last_seq:
            yield LedgerEntry(message.seq, message.data)


async def read_ledger(bus: Bus, job: str, archive: LedgerArchive | None) -> list[LedgerEntry]:
    """Return all entries that ``scan_ledger`` yields."""
    return [entry async for entry in scan_ledger(bus, job, archive)]
