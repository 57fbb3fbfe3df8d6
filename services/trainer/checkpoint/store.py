"""Checkpoint directories on disk: complete and unchanged, or absent.

::

    <root>/<job>/<batch number, 8 digits>-<digest, 12 digits>/
        ...               files of ``state.py``
        manifest.json     number, the caller's metadata, environment, size and sha256 of every file above
        COMMIT            sha256 of manifest.json: the checkpoint's digest

Files are written and fsync'd in a temporary directory, which is then renamed; COMMIT is written last. Remains of a
crash have no COMMIT and are never loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.shared.errors import CheckpointError

__all__ = [
    "CheckpointManifest",
    "StoredCheckpoint",
    "StoredFile",
    "commit",
    "describe_file",
    "list_checkpoints",
    "partial_directory",
    "read_manifest",
    "remove_leftovers",
    "remove_partial",
    "retain",
    "sync_directory",
    "verify_files",
    "write_bytes",
]

SCHEMA = 2
MANIFEST, COMMIT = "manifest.json", "COMMIT"
_TEMPORARY = ".partial-"
_OURS = re.compile(r"\.partial-(\d{8,})-\w+|(\d{8,})-[0-9a-f]{12}")
"""Pattern of the names of the directories that this module creates."""
_BLOCK = 1 << 22


class StoredFile(msgspec.Struct, frozen=True):
    """Size and sha256 (hex) of one file."""

    nbytes: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a checkpoint.

    ``number`` is the last batch trained before it (0: none). ``environment`` holds the properties that a bit-identical
    replay needs. ``meta`` belongs to the caller: policy version, epoch, configuration. ``files`` are named relative to
    the directory.
    """

    schema: int
    job: str
    number: int
    meta: dict[str, Any]
    environment: dict[str, str]
    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint on disk. ``digest``: sha256 of the manifest, which holds the hashes of all files."""

    path: Path
    digest: str
    manifest: CheckpointManifest


def partial_directory(root: Path, job: str, number: int, token: str) -> Path:
    """Return the directory of a checkpoint before its commit; ``token`` separates concurrent writers."""
    return root / job / f"{_TEMPORARY}{number:08d}-{token}"


def commit(
    partial: Path,
    *,
    job: str,
    number: int,
    meta: dict[str, Any],
    environment: dict[str, str],
    files: Mapping[str, StoredFile],
) -> Path:
    """Turn the durable files in ``partial`` into a checkpoint.

    If a checkpoint with the same number and content exists, it is kept, and ``partial`` is deleted.

    Returns:
        Directory of the checkpoint.

    Raises:
        OSError: the disk refuses a write.
    """
    manifest = CheckpointManifest(
        schema=SCHEMA, job=job, number=number, meta=meta, environment=environment, files=dict(sorted(files.items()))
    )
    data = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1)
    digest = hashlib.sha256(data).hexdigest()
    path = partial.parent / f"{number:08d}-{digest[:12]}"
    if (path / COMMIT).exists():
        shutil.rmtree(partial)
        return path
    if path.exists():  # remains of a crash before COMMIT
        shutil.rmtree(path)
    write_bytes(partial / MANIFEST, data)
    sync_directory(partial)
    partial.rename(path)
    sync_directory(path.parent)
    write_bytes(path / (COMMIT + ".partial"), digest.encode())
    (path / (COMMIT + ".partial")).rename(path / COMMIT)
    sync_directory(path)
    return path


def list_checkpoints(root: Path, job: str) -> list[StoredCheckpoint]:
    """Return ``job``'s committed checkpoints with intact manifests, oldest batch first. Reads no tensor files."""
    found = []
    for path in sorted((root / job).glob("*-*")) if (root / job).is_dir() else []:
        if path.name.startswith(_TEMPORARY) or not (path / COMMIT).exists():
            continue
        try:
            found.append(read_manifest(path))
        except CheckpointError:
            continue
    return sorted(found, key=lambda c: c.manifest.number)


def read_manifest(path: Path) -> StoredCheckpoint:
    """Return the description of the checkpoint at ``path``, without reading its tensor files.

    Raises:
        CheckpointError: the checkpoint is not committed, or its manifest was changed.
    """
    try:
        digest = (path / COMMIT).read_text(encoding="ascii").strip()
        data = (path / MANIFEST).read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a committed checkpoint: {error}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(f"{path / MANIFEST} does not match its COMMIT marker: use another checkpoint")
    try:
        schema = msgspec.json.decode(data, type=_Versioned).schema
        if schema != SCHEMA:
            raise CheckpointError(f"{path} has schema {schema}; this build reads {SCHEMA}")
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path / MANIFEST} does not decode: {error}") from None
    return StoredCheckpoint(path, digest, manifest)


def verify_files(stored: StoredCheckpoint, *, rank: int = 0, ranks: int = 1) -> None:
    """Compare the files with the manifest. With several ranks, each rank reads its share.

    Raises:
        CheckpointError: a file is missing or was changed.
    """
    for name, expected in sorted(stored.manifest.files.items())[rank::ranks]:
        path = stored.path / name
        try:
            found = describe_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} is part of the checkpoint but cannot be read: {error}") from None
        if found != expected:
            raise CheckpointError(f"{path} was changed after the checkpoint was written: use another checkpoint")


def retain(root: Path, job: str, *, recorded: int, keep: int, pinned: Collection[int] = ()) -> list[Path]:
    """Delete the job's checkpoints up to batch ``recorded``, except those of the ``keep`` newest batches and those of
    the batches in ``pinned``.

    Remains of crashed writers up to that number are deleted too, so only the writer of ``job`` may call this. COMMIT is
    removed first, so that nobody loads a checkpoint that is being deleted.

    Args:
        recorded: number of the newest checkpoint in the ledger, which a restart loads. Newer checkpoints on disk are
            ignored: a trainer committed them, but ended before it reported them.

    Returns:
        Directories of the committed checkpoints that were deleted.

    Raises:
        OSError: the disk refuses a deletion.
    """
    committed = [c for c in list_checkpoints(root, job) if c.manifest.number <= recorded]
    numbers = {*sorted({c.manifest.number for c in committed})[-keep:], *pinned}
    kept = {c.path for c in committed if c.manifest.number in numbers}
    deleted = [c.path for c in committed if c.path not in kept]
    for path in deleted:
        (path / COMMIT).unlink()
        sync_directory(path)
    for path, number in _directories(root, job):
        if path not in kept and number <= recorded:
            shutil.rmtree(path)
    return deleted


def remove_leftovers(root: Path, job: str) -> None:
    """Delete uncommitted checkpoints of ``job``. Must not run while a writer is active. Raises OSError."""
    for path, _ in _directories(root, job):
        if not (path / COMMIT).exists():
            shutil.rmtree(path)


def remove_partial(partial: Path) -> None:
    """Delete an unfinished checkpoint; errors are ignored."""
    shutil.rmtree(partial, ignore_errors=True)


def describe_file(path: Path) -> StoredFile:
    """Return size and hash of a file on disk. Raises OSError."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
        return StoredFile(file.tell(), hasher.hexdigest())


def write_bytes(path: Path, data: bytes) -> StoredFile:
    """Write a file and fsync it. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(len(data), hashlib.sha256(data).hexdigest())


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable (fsync). Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _directories(root: Path, job: str) -> list[tuple[Path, int]]:
    """Return directories of ``job``'s checkpoints, finished or not, with their numbers; ignores other directories."""
    paths = [path for path in (root / job).iterdir() if path.is_dir()] if (root / job).is_dir() else []
    return [(path, int(name[1] or name[2])) for path in paths if (name := _OURS.fullmatch(path.name))]


class _Versioned(msgspec.Struct):
    schema: int
