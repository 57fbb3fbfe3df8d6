"""Copies of versions from another host: one process of this host fetches each version, the others open its slot.

The fetching process holds the lock of a file beside the slots, which the kernel releases if it dies: then the next
process takes over. It writes its progress into the file, so that waiting processes detect a stall and fetch by
themselves.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import DeadlineError, Fenced, NotFound, Unavailable, WeightsError
from penstock.shared.protocol.weights import Layout, WeightManifest
from penstock.shared.transport.bulk_segment import LockedFile
from penstock.shared.weights.base import Way
from penstock.shared.weights.flat import digest_of
from penstock.shared.weights.shm import ShmReceiver, ShmStaged
from penstock.shared.weights.slot_header import SlotHeader, read_slot, write_slot
from penstock.shared.weights.slots import SlotPool, slot_paths, slot_stem, turn_path

__all__ = ["HostCopies"]

Fetch = Callable[[NDArray[np.uint8], Callable[[int], None]], None]
"""Fills the first argument; calls the second one repeatedly with the bytes received so far. Raises WeightsError."""

STANDSTILL_S = 5.0
"""Time without progress of the fetching process after which the others fetch by themselves (seconds)."""
MAX_SLOTS = 4
_ROOM_S = 1.0
"""Timeout for a slot without readers (seconds)."""
_POLL_S = 0.005
_PROGRESS = struct.Struct("<QQ")
"""Version, and bytes received."""


class HostCopies:
    """Slots of this host, filled by the first process that needs a version and read by all."""

    def __init__(self, settings: ServiceSettings, layout: Layout | None = None) -> None:
        self._directory, self._host = settings.shm_dir, settings.host_id
        self._reader = ShmReceiver(settings, layout)
        self._pools: dict[str, SlotPool] = {}
        self._jobs: set[str] = set()

    def stage(self, manifest: WeightManifest, fetch: Fetch, *, end: float) -> ShmStaged | None:
        """Open the copy of ``manifest`` on this host; fetch it if there is none. ``end``: deadline (monotonic).

        Returns:
            None if the caller should fetch into private memory: no shared memory is left, or the fetching process
                stalls.

        Raises:
            WeightsError: the version cannot be fetched, or another process did not finish before ``end``.
        """
        self._jobs.add(manifest.job)
        seen, seen_at = b"", time.monotonic()
        try:
            turn = self._turn(manifest.job)
        except OSError:  # the directory is missing, or the file belongs to another user
            return None
        try:
            while True:
                if (copy := self._find(manifest)) is not None:
                    return copy
                if turn.try_exclusive() and turn.is_current():
                    return self._find(manifest) or self._make(manifest, fetch, turn)
                if not turn.is_current():
                    turn.close()
                    turn = self._turn(manifest.job)
                now, progress = time.monotonic(), os.pread(turn.fd, _PROGRESS.size, 0)
                if progress != seen:
                    seen, seen_at = progress, now
                elif now > seen_at + STANDSTILL_S:
                    return None
                if now > end:
                    raise WeightsError(
                        f"version {manifest.version}: process {turn.holders()} of host '{self._host}', which fetches "
                        "it, did not finish in time"
                    )
                time.sleep(_POLL_S)
        finally:
            turn.close()

    def close(self) -> None:
        """Remove the copies without readers and writers."""
        self._reader.close()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        for job in self._jobs:
            for path in (*slot_paths(self._directory, job, self._host), turn_path(self._directory, job, self._host)):
                _remove_unused(path)

    def _turn(self, job: str) -> LockedFile:
        """Return the file whose lock the fetching process holds."""
        path = turn_path(self._directory, job, self._host)
        return LockedFile(path, os.open(path, os.O_RDWR | os.O_CREAT, 0o600))

    def _find(self, manifest: WeightManifest) -> ShmStaged | None:
        """Open the copy, if there is one with the right bytes."""
        for path in slot_paths(self._directory, manifest.job, self._host):
            try:
                file = LockedFile.open(path)
                matches = not read_slot(file).mismatch(manifest)
                file.close()
                if matches:
                    return self._reader.open(path, manifest, Way("tcp"))
            except (NotFound, Unavailable, WeightsError):  # removed, owned by another user, being written, or damaged
                continue
        return None

    def _make(self, manifest: WeightManifest, fetch: Fetch, turn: LockedFile) -> ShmStaged | None:
        """Fetch into a slot; the caller holds the lock."""
        layout = manifest.layout

        def tell(num_bytes: int) -> None:
            os.pwrite(turn.fd, _PROGRESS.pack(manifest.version, num_bytes), 0)

        tell(0)
        try:
            slot = self._pool(manifest).acquire(epoch=manifest.epoch, timeout_s=_ROOM_S)
        except (Unavailable, DeadlineError):
            return None
        except Fenced as error:
            raise WeightsError(f"version {manifest.version}: {error}") from None
        try:
            sequence = read_slot(slot).sequence | 1
            header = SlotHeader(sequence, manifest.version, manifest.epoch, layout.nbytes, layout.id)
            write_slot(slot, header)
            fetch(slot.data, tell)
            if digest_of(slot.data) != manifest.digest:
                raise WeightsError(
                    f"version {manifest.version}: the fetched bytes do not match digest {manifest.digest}"
                )
            write_slot(slot, msgspec.structs.replace(header, sequence=sequence + 1, digest=manifest.digest))
        finally:
            slot.unlock()
        return self._reader.open(slot.path, manifest, Way("tcp", layout.nbytes), verify=False)

    def _pool(self, manifest: WeightManifest) -> SlotPool:
        """Return the slots of the job, including those of other processes; one pool per layout size."""
        key = f"{manifest.job} {manifest.layout.nbytes}"
        if key not in self._pools:
            self._pools[key] = SlotPool(
                self._directory,
                manifest.job,
                manifest.layout.nbytes,
                count=0,
                max_count=MAX_SLOTS,
                stem=slot_stem(manifest.job, self._host),
            )
        self._pools[key].refresh()
        return self._pools[key]


def _remove_unused(path: Path) -> None:
    try:
        file = LockedFile.open(path)
    except (NotFound, Unavailable):
        return
    if file.try_exclusive():
        file.unlink()
    file.close()
