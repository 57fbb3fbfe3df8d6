"""Shared-memory slots of one job on one host, as seen by the process that fills them.

A slot is a file; a receiver keeps its shared lock for as long as it uses the slot, so only its release or its death
frees it. Files of a crashed publisher are adopted: their versions stay available until they are overwritten. A host
that fetches versions from another one keeps them in slots of its own, whose names contain its host id (``copies_of``).
Slots in the memory of a GPU have files, too, which hold only headers and locks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.shared.errors import DeadlineError, Fenced, NotFound, Unavailable, WeightsError
from penstock.shared.protocol.weights import Layout, WeightManifest, slot_name
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile, Segment
from penstock.shared.weights.slot_header import SlotHeader, read_slot, write_slot

__all__ = ["SlotPool", "is_slot_name", "lock_version", "slot_paths", "slot_stem", "turn_path"]

_POLL_S = 0.005
_LOOK_S = 1.0
"""Seconds between two looks at who holds the slots during a wait."""


def is_slot_name(job: str, name: str) -> bool:
    """Return True if ``name`` is the file name of a slot that a publisher of ``job`` fills."""
    number = name.rpartition(".")[2]
    return number.isascii() and number.isdecimal() and len(number) < 10 and name == slot_name(job, int(number))


def slot_stem(job: str, copies_of: str = "") -> str:
    """Return the common prefix of the file names of a job's slots, up to the slot number.

    ``copies_of``: id of the host whose fetched copies are meant; '': the publisher's slots.
    """
    return slot_name(job, 0, copies_of).removesuffix("0")


def slot_paths(directory: Path, job: str, copies_of: str = "") -> list[Path]:
    """Return all slot files of a job in ``directory``; ``copies_of``: see ``slot_stem``."""
    return _paths(directory, slot_stem(job, copies_of))


def lock_version(paths: Iterable[Path], layout: Layout, digests: Collection[str]) -> tuple[LockedFile, str] | None:
    """Find a slot among ``paths`` that holds a version with one of ``digests``; lock it and return ``(slot, digest)``.

    None: there is no such slot, or all of them are being written.
    """
    for path in paths:
        with contextlib.suppress(NotFound, Unavailable, WeightsError):  # removed, of another user, or not a slot
            file = LockedFile.open(path)
            if file.try_shared() and (digest := read_slot(file).digest_in(layout)) and digest in digests:
                return file, digest
            file.close()
    return None


def turn_path(directory: Path, job: str, host: str) -> Path:
    """Return the path of a job's lock file on ``host``. The process that holds the lock on this file fetches versions
    for all processes of the host."""
    return (directory / slot_name(job, 0, host)).with_suffix(".turn")


class SlotPool:
    """Pool of slots of ``nbytes`` bytes. The pool begins with ``count`` slots, and grows up to ``max_count`` while
    receivers hold all of its slots.

    Args:
        stem: start of the file names, without the number; default: ``slot_stem(job)``.
        on_piece: called repeatedly while slots are created and mapped here.
    """

    def __init__(
        self,
        directory: Path,
        job: str,
        nbytes: int,
        *,
        count: int,
        max_count: int,
        stem: str = "",
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory, self._job, self._nbytes, self._stem = directory, job, nbytes, stem or slot_stem(job)
        self._max_count = max_count
        self._slots: list[Segment] = []
        self.waiting: tuple[str, float] | None = None
        """Current wait of ``acquire``: a text that names the processes that hold the slots, and the start (monotonic)
        of the wait. None: ``acquire`` does not wait. Any thread may read this."""
        self.refresh(on_piece)
        while len(self._slots) < count:
            self._slots.append(self._create(on_piece))

    def acquire(
        self,
        *,
        epoch: int,
        timeout_s: float,
        keep: WeightManifest | None = None,
        on_piece: Callable[[], None] = lambda: None,
    ) -> Segment:
        """Return an exclusively locked slot without readers; never the slot of the newest version, or of ``keep``.

        ``on_piece`` is called repeatedly while a slot is created.

        Raises:
            DeadlineError: receivers hold all of ``max_count`` slots for longer than ``timeout_s``.
            Fenced: a publisher with a higher epoch has written to a slot.
            Unavailable: the directory has no room for another slot, and there are no slots, or receivers hold all of
                them for longer than ``timeout_s``.
        """
        began, full = time.monotonic(), ""
        deadline, look_at = began + timeout_s, began + _LOOK_S
        try:
            while True:
                self._slots = [slot for slot in self._slots if slot.is_current()]  # not one that a cleanup removed
                if (free := self._free(epoch, keep)) is not None:
                    return free
                if len(self._slots) < self._max_count and not full:
                    try:
                        self._slots.append(self._create(on_piece))
                        continue
                    except Unavailable as error:  # a reader may release one of the others soon
                        full = str(error)
                if full and not self._slots:
                    raise Unavailable(full)
                if (now := time.monotonic()) > deadline:
                    raise self._too_few(full, timeout_s)
                if now > look_at:
                    self.waiting = f"a weight slot: all {len(self._slots)} are in use, by {self._holders()}", began
                    look_at = now + _LOOK_S
                time.sleep(_POLL_S)
        finally:
            self.waiting = None

    def _free(self, epoch: int, keep: WeightManifest | None) -> Segment | None:
        """Lock a slot that may be overwritten, and return it; None if there is no such slot now."""
        newest = self._newest(epoch)
        for slot in self._slots:
            if slot is not newest and not _holds(slot, keep) and slot.try_exclusive():
                return slot
        return None

    def _too_few(self, full: str, timeout_s: float) -> Unavailable | DeadlineError:
        """Return the error for an ``acquire`` that timed out; ``full`` is the reason why no slot could be added, or
        ''."""
        if full:
            return Unavailable(f"{full}; processes use the other {len(self._slots)} slots: {self._holders()}")
        return DeadlineError(
            f"waited {timeout_s:.1f} s for a weight slot of job '{self._job}': {len(self._slots)} of at most "
            f"{self._max_count} exist, held by {self._holders()}; end or resume those processes"
        )

    def refresh(self, on_piece: Callable[[], None] = lambda: None) -> None:
        """Adopt slots that other processes created. ``on_piece`` is called repeatedly while a slot is mapped, after
        each part of it."""
        known = {slot.path for slot in self._slots if slot.is_current()}
        for path in _paths(self._directory, self._stem):
            if path not in known:
                self._adopt(path, on_piece)

    def digests(self, layout: Layout) -> list[str]:
        """Return the digests of the complete versions of ``layout`` in the slots."""
        known = (read_slot(slot).digest_in(layout) for slot in self._slots)
        return list(dict.fromkeys(digest for digest in known if digest))

    def data_of(self, file: LockedFile) -> NDArray[np.uint8] | None:
        """Return the bytes of a slot, uint8 [nbytes], if this process has mapped it, else None. Any thread may call
        this function."""
        identity = file.identity()
        return next((slot.data for slot in list(self._slots) if slot.fd >= 0 and slot.identity() == identity), None)

    def close(self) -> None:
        """Close the files; they stay on disk."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _newest(self, epoch: int) -> Segment | None:
        """Return the slot of the newest complete version, which late joiners read.

        Raises:
            Fenced: a publisher with a higher epoch has written to a slot.
        """
        newest, best = None, (-1, -1)
        for slot in self._slots:
            header = read_slot(slot)
            if header.epoch > epoch:
                raise Fenced(
                    f"{slot.path.name} was written by epoch {header.epoch}; epoch {epoch} must stop publishing"
                )
            if header.sealed and (header.epoch, header.version) > best:
                newest, best = slot, (header.epoch, header.version)
        return newest

    def _adopt(self, path: Path, on_piece: Callable[[], None] = lambda: None) -> None:
        """Adopt the slot at ``path`` if it has the right size; else remove it unless a process still uses it."""
        try:
            file = LockedFile.open(path)
        except NotFound:
            return
        try:
            read_slot(file)
            usable = file.size() == DATA_OFFSET + self._nbytes
        except WeightsError:  # its creator died before it was complete
            usable = False
        if usable:
            self._slots.append(Segment(path, os.dup(file.fd), on_piece=on_piece))
        elif file.try_exclusive():
            file.unlink()
        file.close()

    def _create(self, on_piece: Callable[[], None] = lambda: None) -> Segment:
        number = 0
        while True:  # an existing file belongs to another process: never write to it
            try:
                slot = Segment.create(self._directory / f"{self._stem}{number}", self._nbytes, on_piece)
            except FileExistsError:
                number += 1
                continue
            write_slot(slot, SlotHeader())
            return slot

    def _holders(self) -> str:
        pids = sorted({pid for slot in self._slots for pid in slot.holders()})
        return ", ".join(f"process {pid}{_state(pid)}" for pid in pids) or "processes outside of this pid namespace"


def _paths(directory: Path, stem: str) -> list[Path]:
    return sorted(directory.glob(stem + "[0-9]*"))


def _holds(slot: Segment, manifest: WeightManifest | None) -> bool:
    return manifest is not None and not read_slot(slot).mismatch(manifest)


def _state(pid: int) -> str:
    """Return `` (stopped)`` if SIGSTOP stopped the process ``pid``, otherwise ''."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return " (stopped)" if status.rpartition(")")[2].split()[:1] == ["T"] else ""
