"""Shared-memory slots of one job on one host, as seen by the process that fills them.

A slot is a file; a receiver keeps its shared lock for as long as it uses the slot, so only its release or its death
frees it. Files of a crashed publisher are adopted: their versions stay available until they are overwritten. A host
that fetches versions from another one keeps them in slots of its own, under its host id: ``copies_of``. Slots in the
memory of a GPU have files, too, which hold only headers and locks.
"""

from __future__ import annotations

import time
from pathlib import Path

from penstock.shared.errors import DeadlineError, Fenced, NotFound, WeightsError
from penstock.shared.protocol.weights import WeightManifest, slot_name
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile, Segment
from penstock.shared.weights.slot_header import SlotHeader, read_slot, write_slot

__all__ = ["SlotPool", "is_slot_name", "slot_paths", "slot_stem", "turn_path"]

_POLL_S = 0.005


def is_slot_name(job: str, name: str) -> bool:
    """Return True if ``slot_name`` made ``name`` for a publisher."""
    number = name.rpartition(".")[2]
    return number.isascii() and number.isdecimal() and len(number) < 10 and name == slot_name(job, int(number))


def slot_stem(job: str, copies_of: str = "") -> str:
    """Return the names of a job's slots without their numbers; with ``copies_of`` those that a host fetched."""
    return slot_name(job, 0, copies_of).removesuffix("0")


def slot_paths(directory: Path, job: str, copies_of: str = "") -> list[Path]:
    """Return all slot files of a job; with ``copies_of`` those that this host fetched."""
    return _paths(directory, slot_stem(job, copies_of))


def turn_path(directory: Path, job: str, host: str) -> Path:
    """Return the lock file that serialises fetching of a job's versions on a host."""
    return (directory / slot_name(job, 0, host)).with_suffix(".turn")


class SlotPool:
    """Pool of ``count`` slots of ``nbytes`` bytes, allocated at once; up to ``max_count`` if receivers hold them.

    Args:
        stem: names of the files, without their numbers; default: ``slot_stem(job)``.
    """

    def __init__(self, directory: Path, job: str, nbytes: int, *, count: int, max_count: int, stem: str = "") -> None:
        self._directory, self._job, self._nbytes, self._stem = directory, job, nbytes, stem or slot_stem(job)
        self._max_count = max_count
        self._slots: list[Segment] = []
        self.refresh()
        while len(self._slots) < count:
            self._slots.append(self._create())

    def acquire(self, *, epoch: int, timeout_s: float, keep: WeightManifest | None = None) -> Segment:
        """Return an exclusively locked slot that has no reader and holds neither the newest version nor ``keep``.

        Raises:
            DeadlineError: receivers hold all of ``max_count`` slots for longer than ``timeout_s``.
            Fenced: a slot was written by a higher epoch.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._slots = [slot for slot in self._slots if slot.is_current()]  # not one that a cleanup removed
            newest = self._newest(epoch)
            for slot in self._slots:
                if slot is not newest and not _holds(slot, keep) and slot.try_exclusive():
                    return slot
            if len(self._slots) < self._max_count:
                slot = self._create()
                self._slots.append(slot)
                if slot.try_exclusive():
                    return slot
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {timeout_s:.1f} s for a weight slot of job '{self._job}': {len(self._slots)} of at most "
                    f"{self._max_count} exist, held by {self._holders()}; end or resume those processes"
                )
            time.sleep(_POLL_S)

    def refresh(self) -> None:
        """Adopt the slots created by other processes."""
        known = {slot.path for slot in self._slots if slot.is_current()}
        for path in _paths(self._directory, self._stem):
            if path not in known:
                self._adopt(path)

    def close(self) -> None:
        """Close the files; they stay on disk."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _newest(self, epoch: int) -> Segment | None:
        """Return the slot of the newest complete version, which late joiners read."""
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

    def _adopt(self, path: Path) -> None:
        """Adopt a slot of the right size; remove another one unless a process still uses it."""
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
            self._slots.append(Segment.open(path))
        elif file.try_exclusive():
            file.unlink()
        file.close()

    def _create(self) -> Segment:
        number = 0
        while True:  # an existing file belongs to another process: never write to it
            try:
                slot = Segment.create(self._directory / f"{self._stem}{number}", self._nbytes)
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
    """Return `` (stopped)`` for a process stopped by SIGSTOP."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return " (stopped)" if status.rpartition(")")[2].split()[:1] == ["T"] else ""
