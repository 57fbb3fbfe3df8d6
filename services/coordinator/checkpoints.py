"""Checkpoints as people see them: what the ledger says exists, joined with the files on this host.

A checkpoint directory holds ``COMMIT`` (sha256 of the manifest), ``manifest.json`` (size and sha256 of each file) and
those files; the trainer writes it, and nothing that the manifest does not name can be read through here.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.coordinator.ledger import LedgerState
from penstock.shared.config.service import checkpoint_path
from penstock.shared.errors import ConfigError, Conflict, NotFound
from penstock.shared.protocol.events import Checkpointed

__all__ = [
    "StoredCheckpoint",
    "StoredFile",
    "checkpoint_row",
    "checkpoint_rows",
    "choose_checkpoint",
    "delete_checkpoint",
    "find_file",
    "read_stored",
]

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
MANIFEST, COMMIT = "manifest.json", "COMMIT"
MAX_DIGITS = 18
"""Digits of the largest number that a checkpoint can have."""


class StoredFile(msgspec.Struct, frozen=True):
    """Size and sha256 (hex) of one file."""

    nbytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint on this host."""

    path: Path
    files: dict[str, StoredFile]


def checkpoint_rows(state: LedgerState, data_dir: Path) -> list[dict[str, Any]]:
    """Every checkpoint of the present lineage, oldest first. Reads the disk: call it in a thread."""
    return [checkpoint_row(state, data_dir, number) for number in sorted(state.checkpoints)]


def checkpoint_row(state: LedgerState, data_dir: Path, number: int) -> dict[str, Any]:
    """One checkpoint. ``available``: its files are on this host; without them ``files`` is empty.

    Raises:
        NotFound: the ledger knows no such checkpoint.
    """
    event = _event(state, number)
    path = checkpoint_path(data_dir, event.path)
    stored = read_stored(path)
    files = {} if stored is None else stored.files
    return {
        "number": number,
        "version": event.version,
        "digest": event.digest,
        "path": str(path),
        "time": event.time,
        "reason": event.reason,
        "initial": number == 0,
        "newest": number == max(state.checkpoints),
        "final": bool(state.finished) and number == max(state.checkpoints),
        "best": state.best is not None and state.best.number == number,
        "available": stored is not None,
        "format": "lora" if ADAPTER in files else "hf" if WEIGHTS in files else None,
        "nbytes": sum(file.nbytes for file in files.values()),
        "files": [{"name": name, "nbytes": f.nbytes, "sha256": f.sha256} for name, f in sorted(files.items())],
    }


def choose_checkpoint(state: LedgerState, name: str) -> Checkpointed:
    """The checkpoint that people call ``name``: a batch number, `initial`, `newest`, `final` or `best`.

    Raises:
        ConfigError: not such a name.
        NotFound: there is no such checkpoint.
    """
    numbers = sorted(state.checkpoints)
    if name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS:
        return _event(state, int(name))
    if name not in ("initial", "newest", "final", "best"):
        raise ConfigError(f"'{name[:100]}' is no checkpoint: give its number, or initial, newest, final or best")
    if not numbers or (name == "final" and not state.finished) or (name == "best" and state.best is None):
        raise NotFound(f"there is no {name} checkpoint yet")
    if name == "best" and state.best is not None:
        return state.checkpoints[state.best.number]
    return _event(state, 0 if name == "initial" else numbers[-1])


def find_file(state: LedgerState, data_dir: Path, number: int, name: str) -> tuple[Path, StoredFile]:
    """Where a file of a checkpoint lies. Only names of its manifest, and the manifest itself, are found.

    Raises:
        NotFound: no such checkpoint or file.
        Conflict: its files are not on this host, or not any more.
    """
    stored = read_stored(checkpoint_path(data_dir, _event(state, number).path))
    if stored is None:
        raise Conflict(f"the files of checkpoint {number} are not on the coordinator's host (deleted, or never there)")
    file = stored.files.get(name)
    if file is None:
        raise NotFound(f"checkpoint {number} has no file '{name[:200]}'; it has: {', '.join(sorted(stored.files))}")
    path = stored.path / name
    if not path.resolve().is_relative_to(stored.path.resolve()) or not path.is_file():
        raise Conflict(f"file '{name}' of checkpoint {number} is gone")
    return path, file


def _event(state: LedgerState, number: int) -> Checkpointed:
    try:
        return state.checkpoints[number]
    except KeyError:
        known = ", ".join(str(n) for n in sorted(state.checkpoints)) or "none"
        raise NotFound(f"no checkpoint {number}; there are: {known}") from None


def delete_checkpoint(state: LedgerState, data_dir: Path, number: int) -> None:
    """Remove the files of a checkpoint from this host; the ledger goes on to name it.

    Raises:
        NotFound: no such checkpoint.
        Conflict: the run still needs it (it is the initial, the best or the newest one), or its files are not here.
    """
    stored = read_stored(checkpoint_path(data_dir, _event(state, number).path))
    if not state.finished and number in (*state.pinned, max(state.checkpoints)):
        raise Conflict(f"checkpoint {number} is needed while the job runs: it is the initial, the best or the newest")
    if stored is None:
        raise Conflict(f"the files of checkpoint {number} are not on the coordinator's host (deleted, or never there)")
    (stored.path / COMMIT).unlink(missing_ok=True)  # first: a removal that breaks off leaves nothing that looks whole
    shutil.rmtree(stored.path)


def read_stored(path: Path) -> StoredCheckpoint | None:
    """The files in a directory, None unless it is committed and its manifest is the one that was committed."""
    try:
        digest = (path / COMMIT).read_text(encoding="ascii").strip()
        data = (path / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(data, type=_Manifest)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None
    own = hashlib.sha256(data).hexdigest()
    if own != digest:
        return None
    return StoredCheckpoint(path, {**manifest.files, MANIFEST: StoredFile(len(data), own)})
