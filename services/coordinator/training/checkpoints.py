"""Checkpoints of a job: the checkpoints named in the ledger, joined with their files on this host.

A checkpoint directory contains ``COMMIT`` (SHA-256 of the manifest), ``manifest.json`` (size and SHA-256 of each file)
and those files. The trainer writes it; this module returns only files that the manifest names.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.ledger_cache import LedgerCache
from penstock.shared.config.model import CHECKPOINT_NAMES
from penstock.shared.config.service import checkpoint_path
from penstock.shared.errors import ConfigError, Conflict, NotFound
from penstock.shared.protocol.events import Checkpointed

__all__ = [
    "COMMIT",
    "Artifacts",
    "Checkpoints",
    "StoredCheckpoint",
    "StoredFile",
    "checkpoint_row",
    "choose_checkpoint",
    "read_stored",
]

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
MANIFEST, COMMIT = "manifest.json", "COMMIT"
MAX_DIGITS = 18
"""Maximum number of digits in the number of a checkpoint."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class StoredFile(msgspec.Struct, frozen=True):
    """Size in bytes and SHA-256 (hex) of one file."""

    nbytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint on this host."""

    path: Path
    files: dict[str, StoredFile]


class Checkpoints:
    """Checkpoints of the current lineage of each job. Every method raises NotFound (no such job or checkpoint)."""

    def __init__(self, ledgers: LedgerCache, data_dir: Path) -> None:
        self._ledgers, self._data_dir = ledgers, data_dir

    async def rows(self, job: str) -> list[dict[str, Any]]:
        """Return the checkpoints of a job, oldest first.

        A row has ``number``, ``version``, ``digest``, ``path``, ``time``, ``reason``, ``nbytes``, ``files`` (``name``,
        ``nbytes``, ``sha256``), ``available`` (the files are on the coordinator's host) and the flags ``initial``,
        ``best``, ``newest``, ``final``.
        """
        state = await self._ledgers.state(job)
        return await asyncio.to_thread(_checkpoint_rows, state, self._data_dir)

    async def row(self, job: str, number: int) -> dict[str, Any]:
        """Return the row of checkpoint ``number``, in the form that ``rows`` describes."""
        return await asyncio.to_thread(checkpoint_row, await self._ledgers.state(job), self._data_dir, number)

    async def file(self, job: str, number: int, name: str) -> tuple[Path, str]:
        """Return the path and SHA-256 of a file of a committed checkpoint.

        Raises:
            NotFound: no such checkpoint, or its manifest does not name such a file.
            Conflict: the files are not on the coordinator's host.
        """
        state = await self._ledgers.state(job)
        path, file = await asyncio.to_thread(_find_file, state, self._data_dir, number, name)
        return path, file.sha256

    async def delete(self, job: str, number: int) -> None:
        """Remove the files of a checkpoint from this host; the ledger still names it.

        Raises:
            Conflict: the run still needs it, or its files are not on this host.
        """
        await asyncio.to_thread(_delete, await self._ledgers.state(job), self._data_dir, number)


def _checkpoint_rows(state: LedgerState, data_dir: Path) -> list[dict[str, Any]]:
    return [checkpoint_row(state, data_dir, number) for number in sorted(state.checkpoints)]


def checkpoint_row(state: LedgerState, data_dir: Path, number: int) -> dict[str, Any]:
    """Return one checkpoint. ``available``: its files are on this host; otherwise ``files`` is empty. Reads the disk.

    Raises:
        NotFound: the ledger has no such checkpoint.
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
    """Return the checkpoint called ``name``: a batch number N, `step:N`, or one of CHECKPOINT_NAMES.

    Raises:
        ConfigError: the name has another form.
        NotFound: there is no such checkpoint; the message names another one, if there is any.
    """
    number = name.removeprefix("step:")
    if number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS:
        return _event(state, int(number))
    if name not in CHECKPOINT_NAMES:
        near = difflib.get_close_matches(name, CHECKPOINT_NAMES, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"'{name[:100]}' is no checkpoint: give its number, or one of {', '.join(CHECKPOINT_NAMES)}{hint}"
        )
    if not state.checkpoints:
        raise NotFound(f"there is no {name} checkpoint: the job has written none yet")
    newest = max(state.checkpoints)
    if name == "final" and not state.finished:
        raise NotFound(f"there is no final checkpoint yet: the job goes on; the latest one is {newest}")
    if name == "best":
        if state.best is None:
            raise NotFound(
                f"there is no best checkpoint yet: the job follows no metric (checkpoint.keep_best), or measured none; "
                f"the latest one is {newest}"
            )
        return state.checkpoints[state.best.number]
    return _event(state, 0 if name == "initial" else newest)


def _find_file(state: LedgerState, data_dir: Path, number: int, name: str) -> tuple[Path, StoredFile]:
    """Return path, size and SHA-256 of a checkpoint's file: the manifest, or a file that the manifest names."""
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
        known = sorted(state.checkpoints)
        near = f"; the nearest is {min(known, key=lambda n: abs(n - number))}" if known else ""
        listed = ", ".join(map(str, known)) or "none"
        raise NotFound(f"no checkpoint {number}; there are: {listed}{near}") from None


def _delete(state: LedgerState, data_dir: Path, number: int) -> None:
    stored = read_stored(checkpoint_path(data_dir, _event(state, number).path))
    if not state.finished and number in (*state.pinned, max(state.checkpoints)):
        raise Conflict(f"checkpoint {number} is needed while the job runs: it is the initial, the best or the newest")
    if stored is None:
        raise Conflict(f"the files of checkpoint {number} are not on the coordinator's host (deleted, or never there)")
    (stored.path / COMMIT).unlink(missing_ok=True)  # first: an interrupted removal leaves no complete checkpoint
    shutil.rmtree(stored.path)


def read_stored(path: Path) -> StoredCheckpoint | None:
    """Return the committed checkpoint in a directory, or None if ``COMMIT`` is missing or does not match the
    manifest."""
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


class Artifacts:
    """Finds files of committed checkpoints by their SHA-256, in the directories ``root``/JOB/CHECKPOINT.

    A committed manifest never changes, so each is read once; every replica finds the same files. Thread-safe.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[Path, dict[str, str]] = {}
        self._lock = threading.Lock()

    def find(self, sha256: str) -> Path:
        """Return the path of a file with this SHA-256. Raises NotFound."""
        if not _SHA256.fullmatch(sha256):
            raise NotFound(f"'{sha256[:80]}' is no sha256: 64 hex digits")
        with self._lock:
            path = self._find(sha256)
        if path is not None:
            return path
        raise NotFound(f"no committed checkpoint on the coordinator's host holds a file with sha256 {sha256}")

    def _find(self, sha256: str) -> Path | None:
        folders = {path.parent for path in self._root.glob("*/*/COMMIT")}
        self._known = {folder: known for folder, known in self._known.items() if folder in folders}
        for folder in sorted(folders):
            name = self._files(folder).get(sha256)
            path = folder / name if name is not None else None
            if path is not None and path.resolve().is_relative_to(folder.resolve()) and path.is_file():
                return path
        return None

    def _files(self, folder: Path) -> dict[str, str]:
        """Return the names of a checkpoint's files, by SHA-256; cached unless the checkpoint's manifest is
        unreadable."""
        if folder not in self._known:
            stored = read_stored(folder)
            if stored is None:
                return {}
            self._known[folder] = {file.sha256: name for name, file in stored.files.items()}
        return self._known[folder]
