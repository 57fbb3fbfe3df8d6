"""Checkpoints that exist completely or not at all.

::

    <root>/<job>/<batch number, 8 digits>-<digest, 12 digits>/
        model.safetensors  config.json  tokenizer.json ...    loadable with from_pretrained
        optimizer.safetensors  reference.safetensors  rng.safetensors
        manifest.json     number, the caller's facts, pins, and size and xxh3-128 of every file above
        COMMIT            xxh3-128 of manifest.json: the checkpoint's digest

Files are written and fsync'd in a directory of another name, which is then renamed; COMMIT is written last. Whatever a
crash leaves behind has no COMMIT and is never picked. There is no pickle.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from penstock.services.trainer.backends.base import BackendState
from penstock.shared.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointManifest",
    "StoredCheckpoint",
    "StoredFile",
    "list_checkpoints",
    "load_checkpoint",
    "read_manifest",
    "retain",
    "save_checkpoint",
]

SCHEMA = 1
MANIFEST, COMMIT = "manifest.json", "COMMIT"
_TEMPORARY = ".partial-"
_TENSOR_FILES = {
    "weights": "model.safetensors",
    "optimizer": "optimizer.safetensors",
    "reference": "reference.safetensors",
    "rng": "rng.safetensors",
}


class StoredFile(msgspec.Struct, frozen=True):
    """Size and xxh3-128 of one file."""

    nbytes: int
    digest: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself.

    ``number`` is the last batch in it (0: none). ``environment`` holds the pins of a bit-identical replay. ``meta``
    belongs to the caller: policy version, epoch, configuration.
    """

    schema: int
    job: str
    number: int
    meta: dict[str, Any]
    environment: dict[str, str]
    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint on disk. ``digest`` is that of its manifest and so of every byte in it."""

    path: Path
    digest: str
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint whose every byte was verified, in memory."""

    stored: StoredCheckpoint
    state: BackendState

    @property
    def number(self) -> int:
        """Last batch in it."""
        return self.stored.manifest.number

    @property
    def meta(self) -> dict[str, Any]:
        """What the caller of ``save_checkpoint`` gave."""
        return self.stored.manifest.meta


def save_checkpoint(root: Path, job: str, number: int, state: BackendState, meta: dict[str, Any]) -> Path:
    """Write a checkpoint; when this returns it is durable. The same content at the same number is written once.

    Args:
        root: directory of all jobs' checkpoints.
        number: last batch in the state, 0 before the first.
        meta: facts that are stored with it; anything JSON can hold.

    Returns:
        Directory of the checkpoint; also a model directory for ``from_pretrained``.

    Raises:
        CheckpointError: the directory cannot be written (disk full, no permission).
    """
    contents = {**state.files, **_tensor_files(state)}
    manifest = CheckpointManifest(
        schema=SCHEMA,
        job=job,
        number=number,
        meta=meta,
        environment=state.environment,
        files={name: StoredFile(len(data), _digest(data)) for name, data in sorted(contents.items())},
    )
    contents[MANIFEST] = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1)
    digest = _digest(contents[MANIFEST])
    path = root / job / f"{number:08d}-{digest[:12]}"
    if (path / COMMIT).exists():
        return path
    try:
        _write(path, contents, digest)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint {path}: {error}") from error
    return path


def list_checkpoints(root: Path, job: str) -> list[StoredCheckpoint]:
    """Committed checkpoints of ``job`` whose manifest is intact, oldest batch first. Files are not read: see load."""
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
    """The checkpoint at ``path`` without its state.

    Raises:
        CheckpointError: it is not committed, or its manifest was changed.
    """
    try:
        digest = (path / COMMIT).read_text(encoding="ascii").strip()
        data = (path / MANIFEST).read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a committed checkpoint: {error}") from None
    if _digest(data) != digest:
        raise CheckpointError(f"{path / MANIFEST} does not match its COMMIT marker: use another checkpoint")
    try:
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path / MANIFEST} does not decode: {error}") from None
    if manifest.schema != SCHEMA:
        raise CheckpointError(f"{path} has schema {manifest.schema}; this build reads {SCHEMA}")
    return StoredCheckpoint(path, digest, manifest)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every byte of it.

    Raises:
        CheckpointError: it is not committed, or a file is missing or was changed.
    """
    found = read_manifest(path)
    for name, stored in found.manifest.files.items():
        _verify(path / name, stored)
    files = {name: (path / name).read_bytes() for name in found.manifest.files if name not in _TENSOR_FILES.values()}
    tensors = {part: _read_tensors(path / name, found.manifest) for part, name in _TENSOR_FILES.items()}
    return Checkpoint(found, BackendState(**tensors, files=files, environment=found.manifest.environment))


def retain(root: Path, job: str, *, keep: int, pinned: Collection[int] = ()) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints and those of the batch numbers in ``pinned``.

    What crashed writers left behind goes too, so only the writer of ``job`` may call this. The marker is removed first:
    a checkpoint that is being deleted is not picked.

    Returns:
        The committed checkpoints that were deleted.
    """
    committed = list_checkpoints(root, job)
    kept = {c.path for c in committed[-keep:]} | {c.path for c in committed if c.manifest.number in pinned}
    deleted = [c.path for c in committed if c.path not in kept]
    for path in deleted:
        (path / COMMIT).unlink()
        _fsync(path)
    for path in (root / job).iterdir() if (root / job).is_dir() else ():
        if path.is_dir() and path not in kept:
            shutil.rmtree(path)
    return deleted


def _tensor_files(state: BackendState) -> dict[str, bytes]:
    parts: dict[str, dict[str, Tensor]] = {part: getattr(state, part) for part in _TENSOR_FILES}
    return {
        _TENSOR_FILES[part]: save({n: t.contiguous() for n, t in tensors.items()}, metadata={"format": "pt"})
        for part, tensors in parts.items()
        if tensors
    }


def _read_tensors(path: Path, manifest: CheckpointManifest) -> dict[str, Tensor]:
    if path.name not in manifest.files:
        return {}
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return tensors


def _write(path: Path, contents: dict[str, bytes], digest: str) -> None:
    if path.exists():  # left by a crash before its COMMIT
        shutil.rmtree(path)
    partial = path.parent / f"{_TEMPORARY}{path.name}-{secrets.token_hex(4)}"
    partial.mkdir(parents=True)
    for name, data in contents.items():
        _write_file(partial / name, data)
    _fsync(partial)
    partial.rename(path)
    _fsync(path.parent)
    _write_file(path / (COMMIT + ".partial"), digest.encode())
    (path / (COMMIT + ".partial")).rename(path / COMMIT)
    _fsync(path)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verify(path: Path, stored: StoredFile) -> None:
    try:
        with path.open("rb") as file:
            hasher = xxhash.xxh3_128()
            while block := file.read(1 << 22):
                hasher.update(block)
            nbytes = file.tell()
    except OSError as error:
        raise CheckpointError(f"{path} is part of the checkpoint but cannot be read: {error}") from None
    if nbytes != stored.nbytes or hasher.hexdigest() != stored.digest:
        raise CheckpointError(f"{path} was changed after the checkpoint was written: use another checkpoint")


def _digest(data: bytes) -> str:
    digest: str = xxhash.xxh3_128_hexdigest(data)
    return digest
