"""Backup of a whole deployment to a directory while jobs run, and restore to another path or host.

A backup is consistent with the ledger: it contains the entries that ``LEDGER`` had at one moment, and everything to
which these entries refer. While a backup is taken, the leader deletes nothing: the backup requests this every few
seconds. The steps of a backup:

1. It saves the buckets with the job records. They come first, because a ledger may be ahead of its job record, but
   never behind it.
2. It hard-links checkpoints, archived ledger entries and uploads, so that deletions during the copy do not remove them.
3. It takes a mark of each stream: the stream sequence number of the last message. The mark of ``LEDGER`` is the first
   one, because services store data before the ledger entry that refers to the data.
4. It saves the streams, and copies the linked files. A restore deletes the messages after the marks.

The directory contains secrets (hashes of keys, users' data): only its owner may read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.leader_rpc import COORDINATOR
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.kinds import trains
from penstock.shared.config.service import checkpoint_path
from penstock.shared.errors import ArchiveError, ConfigError, Conflict, DataError, PenstockError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Checkpointed, LineageForked, decode_events
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.runtime.lease import LeaseRecord
from penstock.shared.runtime.ledger import LedgerArchive, ledger_archive, scan_ledger
from penstock.shared.runtime.tasks import end_tasks
from penstock.shared.transport.bus import Bus, StreamImage

__all__ = ["BackupManifest", "load_backup", "read_manifest", "restore_files", "restore_streams", "take_backup"]

SCHEMA = 1
MANIFEST, STREAMS, FILES, DATA = "manifest.json", "streams", "files", "data"
FOLDERS = ("checkpoints", "code", "files", "ledgers", "tracking")
"""Folders of the data directory that are copied; the rest is the bus itself, caches, and logs."""
RESTORED = "restored"
"""Folder in a restored data directory, for data of jobs that was outside of the old data directory."""
DERIVED = frozenset({subjects.TICKETS, subjects.RAW, subjects.PARTIAL})
"""Streams with work in progress. The backup leaves them out, because a leader requests all work again that is in flight
according to its ledger."""
KV = "KV_"
LATE = frozenset({f"{KV}{subjects.LEASES}"})
"""Buckets (of leases) that are saved late, because the epoch of a lease must be at least the newest epoch in LEDGER."""
KEPT_WHOLE = frozenset({subjects.AUDIT})
"""Streams of which a restore keeps even messages that arrived during the backup: nothing is ever deleted from them."""
FIRST = {subjects.EXPERIENCE: 0, subjects.INTERACTIONS: 1}
"""Streams whose last stream sequence numbers are recorded right after that of LEDGER, in this order. A restore omits
later messages, and so all data of policies that are unknown to LEDGER."""
HOLD_S, HOLD_EVERY_S = 60.0, 10.0
TRIES = 3
BLOCK = 1 << 20

Report = Callable[[str], None]


class StoredFile(msgspec.Struct, frozen=True):
    """A file of the backup: its path in the backup, its size in bytes and its SHA-256 (hex)."""

    path: str
    nbytes: int
    sha256: str


class StoredStream(msgspec.Struct, frozen=True):
    """A stream in a backup: configuration and state, data, and ``mark``, the last stream sequence number to restore."""

    image: StreamImage
    mark: int
    file: StoredFile


class Reference(msgspec.Struct, frozen=True):
    """A path that a job file names and that lies outside of the data directory. ``file`` is the copy in the backup;
    None if the path is a directory."""

    job: str
    path: str
    file: StoredFile | None = None


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``manifest.json``. This file is written last, so that an interrupted backup has none and is not
    restored."""

    schema: int
    taken: float
    data_dir: str
    jobs: list[str]
    streams: list[StoredStream]
    files: list[StoredFile]
    references: list[Reference]

    @property
    def nbytes(self) -> int:
        """Total bytes of the backup."""
        kept = [reference.file for reference in self.references if reference.file is not None]
        return sum(file.nbytes for file in (*self.files, *kept, *(stream.file for stream in self.streams)))


# -- taking one ------------------------------------------------------------------------------------------------------


async def take_backup(bus: Bus, data_dir: Path, target: Path, report: Report = lambda _: None) -> BackupManifest:
    """Write a backup of the deployment on ``bus``, whose services use ``data_dir``, to an empty or new directory.

    Raises:
        ConfigError: the target is not empty.
        Conflict: another coordinator became leader during each attempt.
        Unavailable: the bus went away.
        OSError: a disk cannot be read or written.
    """
    await asyncio.to_thread(_begin, target)
    for attempt in range(1, TRIES + 1):
        await asyncio.to_thread(_empty, target)
        async with _held(bus):
            epoch = await _epoch(bus)
            manifest = await _take(bus, data_dir, target, report)
            if await _epoch(bus) == epoch:
                break
        report(f"another coordinator leads since; trying again ({attempt} of {TRIES})")
    else:
        raise Conflict(f"another coordinator took the lead {TRIES} times meanwhile; take the backup again")
    await asyncio.to_thread(_write, target / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


def _begin(target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty: a backup needs a directory of its own")
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(0o700)


def _empty(target: Path) -> None:
    for folder in (STREAMS, FILES, DATA):
        shutil.rmtree(target / folder, ignore_errors=True)
        (target / folder).mkdir(mode=0o700)


@asynccontextmanager
async def _held(bus: Bus) -> AsyncIterator[None]:
    """Ask the leading coordinator to delete nothing within the context. Without a leader, nothing is deleted anyway."""

    async def again() -> None:
        while True:
            await asyncio.sleep(HOLD_EVERY_S)
            with contextlib.suppress(Unavailable):
                await bus.request(subjects.HOLD, msgspec.json.encode(HOLD_S), deadline_s=5)

    try:
        await bus.request(subjects.HOLD, msgspec.json.encode(HOLD_S), deadline_s=5)
    except Unavailable:
        if await _is_led(bus):
            raise Conflict("the coordinator that leads holds nothing for a backup: is it of another version?") from None
    asking = asyncio.create_task(again())
    try:
        yield
    finally:
        await end_tasks([asking])
        with contextlib.suppress(Unavailable):
            await bus.request(subjects.HOLD, msgspec.json.encode(0.0), deadline_s=5)


async def _is_led(bus: Bus) -> bool:
    try:
        await bus.request(subjects.LEADER, b"", deadline_s=5)
    except Unavailable:
        return False
    except PenstockError:
        return True  # it answers, but does not lead such a job
    return True


async def _epoch(bus: Bus) -> int:
    entry = await bus.kv(subjects.LEASES).get(COORDINATOR)
    return msgspec.json.decode(entry.value, type=LeaseRecord).epoch if entry is not None and entry.value else 0


async def _take(bus: Bus, data_dir: Path, target: Path, report: Report) -> BackupManifest:
    names = [name for name in await bus.streams() if name not in DERIVED]
    early = [name for name in names if name.startswith(KV) and name not in LATE]
    streams = [await _save(bus, name, target, None) for name in early]
    with _Links(data_dir) as links:
        for _ in range(TRIES):
            await asyncio.to_thread(links.update)
            marks = {subjects.LEDGER: (await bus.stream_state(subjects.LEDGER)).last_seq}
            await asyncio.to_thread(links.update)
            late = set(names) - set(early) - marks.keys()
            for name in sorted(late, key=lambda name: (FIRST.get(name, len(FIRST)), name)):
                marks[name] = (await bus.stream_state(name)).last_seq
            if not (lost := await _lost(bus, links, marks[subjects.LEDGER])):
                break
        else:
            raise Conflict(f"{lost} ({TRIES} tries); take the backup again")
        for name, mark in marks.items():
            report(f"stream {name}")
            streams.append(await _save(bus, name, target, mark))
        report("checkpoints and other files")
        files = await asyncio.to_thread(links.copy, target / FILES)
    entries = (await JobStore(bus).index()).all()
    references = await asyncio.to_thread(
        _references, [entry.record() for entry in entries if not entry.finished], data_dir, target
    )
    return BackupManifest(
        schema=SCHEMA, taken=time.time(), data_dir=str(data_dir), jobs=[entry.id for entry in entries],
        streams=streams, files=files, references=references,
    )  # fmt: skip


async def _lost(bus: Bus, links: _Links, mark: int) -> str:
    """Return an error message if a checkpoint or part of a ledger was deleted before the backup could link it,
    otherwise ''.

    Most of a long ledger is in the archive. This function reads the linked archive, which the backup will contain.
    """
    for entry in (await JobStore(bus).index()).unfinished():
        try:
            checkpoint = await _newest_checkpoint(bus, entry.id, links.archive, mark)
        except ArchiveError as error:
            return str(error)
        if checkpoint and not links.has(checkpoint):
            return f"{checkpoint} was deleted before it could be kept"
    return ""


async def _newest_checkpoint(bus: Bus, job: str, archive: LedgerArchive, mark: int) -> str:
    """Read the ledger up to stream sequence number ``mark``. Return the path of the newest checkpoint that no rollback
    in this part has undone; '' if there is none.

    Raises:
        ArchiveError: a part of the ledger is missing.
    """
    found: list[Checkpointed] = []
    async with contextlib.aclosing(scan_ledger(bus, job, archive, end_seq=mark)) as entries:
        async for entry in entries:
            for event in decode_events(entry.data):
                if isinstance(event, Checkpointed):
                    found.append(event)
                elif isinstance(event, LineageForked):
                    found = [one for one in found if one.number < event.from_batch]
    return found[-1].path if found else ""


async def _save(bus: Bus, name: str, target: Path, mark: int | None) -> StoredStream:
    path, digest, image = target / STREAMS / name, hashlib.sha256(), None
    parts = bus.save_stream(name)
    with path.open("wb") as file:
        async with contextlib.aclosing(parts):
            async for part in parts:
                if isinstance(part, StreamImage):
                    image = part
                else:
                    digest.update(part)
                    await asyncio.to_thread(file.write, part)
        _flush(file)
    assert image is not None, "the image comes first"
    stored = StoredFile(f"{STREAMS}/{name}", path.stat().st_size, digest.hexdigest())
    return StoredStream(image, image.last_seq if mark is None else mark, stored)


class _Links:
    """Hard links to the files of a data directory. A linked file remains even if the deployment deletes it."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir, self._folder = data_dir, data_dir / f".backup-{os.getpid()}"
        self.archive = ledger_archive(self._folder)

    def __enter__(self) -> _Links:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def update(self) -> None:
        """Link new files. Files named COMMIT are linked last, so that no partly linked checkpoint looks complete."""
        for folder in FOLDERS:
            found = (path for path in (self._data_dir / folder).rglob("*") if path.is_file() and _is_done(path))
            for path in sorted(found, key=lambda path: (path.name == "COMMIT", str(path))):
                place = self._folder / path.relative_to(self._data_dir)
                if not place.exists():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):  # deleted just now
                        os.link(path, place)

    def has(self, checkpoint: str) -> bool:
        """Return True if all files of a checkpoint are hard-linked; ``checkpoint`` is its path in the ledger."""
        place = checkpoint_path(self._folder, checkpoint)
        return (place / "COMMIT").exists()

    def copy(self, target: Path) -> list[StoredFile]:
        """Copy the linked files to ``target``, without incomplete checkpoints; return them with their hashes."""
        stored = []
        for path in sorted(path for path in self._folder.rglob("*") if path.is_file()):
            name = path.relative_to(self._folder)
            if name.parts[0] == "checkpoints" and not _is_whole(self._folder, name):
                continue
            stored.append(_copy(path, target / name, f"{FILES}/{name.as_posix()}"))
        return stored


def _is_done(path: Path) -> bool:
    return not any(part.startswith(".partial") for part in path.parts) and path.suffix != ".part"


def _is_whole(root: Path, name: Path) -> bool:
    """Return False if the file belongs to a checkpoint (``checkpoints/JOB/CHECKPOINT``) that is not committed,
    otherwise True."""
    return len(name.parts) < 4 or (root / Path(*name.parts[:3]) / "COMMIT").exists()


def _references(records: list[JobRecord], data_dir: Path, target: Path) -> list[Reference]:
    """Copy each file that a job file names and that lies outside of the data directory; return references to them.

    Also return references to directories (models), which are not copied.
    """
    found: list[Reference] = []
    copies: dict[Path, StoredFile] = {}
    for record in records:
        for text in sorted({text for text in _strings(record.spec) if text.startswith(("/", "~"))}):
            path = Path(text).expanduser()
            if path.is_relative_to(data_dir) or not path.exists():
                continue
            if path.is_file() and path not in copies:
                name = f"{DATA}/{len(copies)}/{path.name}"
                copies[path] = _copy(path, target / name, name)
            found.append(Reference(record.id, text, copies.get(path)))
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)


def _copy(source: Path, target: Path, name: str) -> StoredFile:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, nbytes = hashlib.sha256(), 0
    with source.open("rb") as old, target.open("wb") as new:
        while block := old.read(BLOCK):
            digest.update(block)
            nbytes += new.write(block)
        _flush(new)
    return StoredFile(name, nbytes, digest.hexdigest())


def _write(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        file.write(data)
        _flush(file)
    draft.replace(path)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


# -- going back to one -----------------------------------------------------------------------------------------------


def read_manifest(source: Path) -> BackupManifest:
    """Return the manifest of a backup. Raises ConfigError: there is none, or another version wrote it."""
    try:
        manifest = msgspec.json.decode((source / MANIFEST).read_bytes(), type=BackupManifest)
    except FileNotFoundError:
        raise ConfigError(f"{source} is no backup, or it was not finished: it has no {MANIFEST}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source / MANIFEST} cannot be read: {error}") from None
    if manifest.schema != SCHEMA:
        raise ConfigError(f"{source} has schema {manifest.schema}; this version reads {SCHEMA}")
    return manifest


def load_backup(source: Path) -> BackupManifest:
    """Verify the SHA-256 of every file of a backup, and return the manifest.

    Raises:
        ConfigError: as ``read_manifest``.
        DataError: a file is missing or was changed; the message names it.
    """
    manifest = read_manifest(source)
    kept = [reference.file for reference in manifest.references if reference.file is not None]
    for stored in {file.path: file for file in (*manifest.files, *kept, *(s.file for s in manifest.streams))}.values():
        digest = hashlib.sha256()
        try:
            with (source / stored.path).open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{source / stored.path} cannot be read: {error.strerror}") from None
        if digest.hexdigest() != stored.sha256:
            raise DataError(f"{source / stored.path} was changed since the backup was taken")
    return manifest


def restore_files(source: Path, manifest: BackupManifest, data_dir: Path) -> None:
    """Copy the files of a backup into a data directory that holds no files of a deployment yet.

    Raises:
        ConfigError: the directory already contains a deployment.
        OSError: the disk cannot be written.
    """
    for name in (*FOLDERS, RESTORED):
        if (data_dir / name).exists() and any((data_dir / name).iterdir()):
            raise ConfigError(f"{data_dir / name} is not empty: restore into a data directory of its own")
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = [reference.file for reference in manifest.references if reference.file is not None]
    for stored in manifest.files:
        _copy(source / stored.path, data_dir / Path(stored.path).relative_to(FILES), stored.path)
    for path in {file.path for file in kept}:
        _copy(source / path, data_dir / RESTORED / Path(path).relative_to(DATA), path)


async def restore_streams(
    bus: Bus, source: Path, manifest: BackupManifest, data_dir: Path, report: Report = lambda _: None
) -> list[str]:
    """Restore the streams of a backup to a bus that has none of them. The ``mark`` of each stream is the last stream
    sequence number to restore.

    Then check that every training job can continue. Returns messages for the user, for example about missing paths.

    Raises:
        ConfigError: the bus has such a stream already, or no room.
        DataError: the restored data is inconsistent; the message says how.
        Unavailable: the bus refuses a stream.
    """
    for stream in manifest.streams:
        report(f"stream {stream.image.name}")
        made = await bus.load_stream(stream.image, _parts(source / stream.file.path))
        if (made.messages, made.last_seq) != (stream.image.messages, stream.image.last_seq):
            raise DataError(
                f"stream {made.name} has {made.messages} messages up to {made.last_seq} and should have "
                f"{stream.image.messages} up to {stream.image.last_seq}"
            )
        if stream.mark < made.last_seq and stream.image.name not in KEPT_WHOLE | LATE:
            await _cut(bus, made.name, stream.mark)
    notes = await _repoint(bus, manifest, data_dir)
    for entry in (await JobStore(bus).index()).all():
        if trains(entry.record().spec):
            await _check(bus, entry.id, data_dir, finished=entry.finished)
    return notes


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(512 << 10):
            yield part


async def _cut(bus: Bus, stream: str, mark: int) -> None:
    later = [message.seq for message in await bus.read(stream, ">", start_seq=mark + 1, headers_only=True)]
    for seq in later:
        await bus.delete_message(stream, seq)


async def _repoint(bus: Bus, manifest: BackupManifest, data_dir: Path) -> list[str]:
    """Change paths in job files to the files' new locations; return a message for each path that is missing."""
    notes, store = [], JobStore(bus)
    for entry in (await store.index()).all():
        moved = {manifest.data_dir: str(data_dir)}
        for reference in manifest.references:
            if reference.job == entry.id and not _exists(reference.path):
                if reference.file is None:
                    notes.append(f"job {entry.id} needs {reference.path}, which is not here and not in the backup")
                else:
                    place = Path(reference.file.path).relative_to(DATA)
                    moved[reference.path] = str(data_dir / RESTORED / place)

        def edit(record: JobRecord, moved: dict[str, str] = moved) -> JobRecord:
            return record.model_copy(update={"spec": _moved(record.spec, moved)})

        await store.change(entry.id, edit)
    return notes


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def _moved(value: Any, moved: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in moved.items():
            if value == old or value.startswith(f"{old}/"):
                return new + value[len(old) :]
        return value
    if isinstance(value, Mapping):
        return {key: _moved(inner, moved) for key, inner in value.items()}
    return [_moved(inner, moved) for inner in value] if isinstance(value, list) else value


async def _check(bus: Bus, job: str, data_dir: Path, *, finished: bool) -> None:
    """Check that a job can continue: its ledger is readable, and its checkpoint and all later groups of rollouts exist.

    Raises DataError if they do not.
    """
    state = await Journal(bus, job, archive=ledger_archive(data_dir)).load()
    if finished or state.finished or state.checkpoint is None:
        return
    folder = checkpoint_path(data_dir, state.checkpoint.path)
    if not (folder / "COMMIT").exists():
        raise DataError(f"job {job}: checkpoint {state.checkpoint.number} is not at {folder}")
    needed = _needed(state, state.checkpoint.number)
    there = {m.seq for m in await bus.read(subjects.EXPERIENCE, subjects.experience(job), headers_only=True)}
    if missing := sorted(needed - there):
        raise DataError(
            f"job {job}: {len(missing)} of {len(needed)} groups behind checkpoint {state.checkpoint.number} are "
            f"missing from {subjects.EXPERIENCE}, the first one at {missing[0]}"
        )


def _needed(state: LedgerState, number: int) -> set[int]:
    sealed = {group.seq for batch in state.sealed.values() for group in batch.groups}
    return sealed | {seq for n, batch in state.batches.items() if n > number for seq in batch.seqs}
