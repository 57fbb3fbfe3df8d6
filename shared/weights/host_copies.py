"""Copies of versions from another host: one process of this host fetches each version into a slot, and the others read
that slot.

The fetching process holds the lock of a file beside the slots, which the kernel releases if it dies: then the next
process takes over. It writes its progress into the file, so that waiting processes detect a stall and fetch by
themselves. Making room for a slot is progress, too: the pages of a large one take many seconds.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import DeadlineError, Fenced, NotFound, Unavailable, WeightsError
from penstock.shared.protocol.weights import Layout, WeightManifest
from penstock.shared.transport.bulk_segment import LockedFile
from penstock.shared.weights.base import Way
from penstock.shared.weights.shm import ShmReceiver, ShmStaged
from penstock.shared.weights.slot_header import SlotHeader, read_slot, write_slot
from penstock.shared.weights.slots import SlotPool, lock_version, slot_paths, slot_stem, turn_path

__all__ = ["Changes", "HostCopies"]

Fetch = Callable[[NDArray[np.uint8], Callable[[int], None]], None]
"""Fills the first argument from its beginning; calls the second one repeatedly with the number of bytes received so
far. Raises WeightsError."""

STANDSTILL_S = 5.0
"""Time without progress of the fetching process after which the others fetch by themselves (seconds)."""
MAX_SLOTS = 4
_ROOM_S = 1.0
"""Longest wait for a slot without readers (seconds)."""
_POLL_S = 0.005
_PROGRESS = struct.Struct("<QQ")
"""Content of the lock file: version being fetched, and number of pieces of its slot allocated or received so far."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Changes:
    """Fetches a version as the changes from an earlier version.

    Args:
        bases: digests of the versions from which the publisher offers the changes.
        since: ``since(digest, data)`` returns the fetch from the version with ``digest``, whose bytes are ``data``,
            uint8 [bytes].
    """

    bases: Sequence[str]
    since: Callable[[str, NDArray[np.uint8]], Fetch]


class HostCopies:
    """Slots of this host with versions from another host. The first process that needs a version fills a slot; all
    processes read it."""

    def __init__(self, settings: ServiceSettings, layout: Layout | None = None) -> None:
        self._directory, self._host = settings.shm_dir, settings.host_id
        self._reader = ShmReceiver(settings, layout)
        self._pools: dict[str, SlotPool] = {}
        self._jobs: set[str] = set()

    def stage(
        self, manifest: WeightManifest, fetch: Fetch, *, end: float, changes: Changes | None = None
    ) -> ShmStaged | None:
        """Return this host's copy of the version ``manifest``; fetch the version if there is no copy. ``end``: deadline
        (monotonic).

        If this host has a version of ``changes.bases``, only the changes are fetched; if that fails, all bytes are.

        Returns:
            None if the caller should fetch into private memory: shared memory is full or cannot be used, or the
                fetching process stalls. A warning gives the reason.

        Raises:
            WeightsError: the version cannot be fetched, or another process did not finish before ``end``.
        """
        self._jobs.add(manifest.job)
        seen, seen_at = b"", time.monotonic()
        try:
            turn = self._turn(manifest.job)
        except OSError as error:  # the directory is missing, or the file belongs to another user
            self._go_alone(manifest, str(error))
            return None
        try:
            while True:
                if (copy := self._find(manifest)) is not None:
                    return copy
                if turn.try_exclusive() and turn.is_current():
                    return self._find(manifest) or self._make(manifest, fetch, changes, turn)
                if not turn.is_current():
                    turn.close()
                    turn = self._turn(manifest.job)
                now, progress = time.monotonic(), os.pread(turn.fd, _PROGRESS.size, 0)
                if progress != seen:
                    seen, seen_at = progress, now
                elif now > seen_at + STANDSTILL_S:
                    reason = f"process {turn.holders()}, which fetches it, has not progressed for {STANDSTILL_S:.0f} s"
                    self._go_alone(manifest, reason)
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
        """Remove the copies that no process reads or writes."""
        self._reader.close()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        for job in self._jobs:
            for path in (*slot_paths(self._directory, job, self._host), turn_path(self._directory, job, self._host)):
                _remove_unused(path)

    def _turn(self, job: str) -> LockedFile:
        """Open and return the lock file of a job. A process of this host locks the file while it fetches a version."""
        path = turn_path(self._directory, job, self._host)
        return LockedFile(path, os.open(path, os.O_RDWR | os.O_CREAT, 0o600))

    def _find(self, manifest: WeightManifest) -> ShmStaged | None:
        """Open and return this host's copy of a version; None if there is no complete copy."""
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

    def _make(
        self, manifest: WeightManifest, fetch: Fetch, changes: Changes | None, turn: LockedFile
    ) -> ShmStaged | None:
        """Fetch a version into a slot, and return the opened slot; the caller holds the lock of ``turn``.

        Returns None if there is no room for a slot. Raises WeightsError.
        """
        layout, steps = manifest.layout, itertools.count(1)

        def report() -> None:
            os.pwrite(turn.fd, _PROGRESS.pack(manifest.version, next(steps)), 0)

        report()
        try:
            pool = self._pool(manifest, report)
            slot = pool.acquire(epoch=manifest.epoch, timeout_s=_ROOM_S, on_piece=report)
        except (Unavailable, DeadlineError) as error:
            self._go_alone(manifest, str(error))
            return None
        except Fenced as error:
            raise WeightsError(f"version {manifest.version}: {error}") from None
        try:
            sequence = read_slot(slot).sequence | 1
            header = SlotHeader(sequence, manifest.version, manifest.epoch, layout.nbytes, layout.id)
            write_slot(slot, header)
            if changes is None or not self._make_from_changes(manifest, changes, pool, slot.data, report):
                _fetch_whole(manifest, fetch, slot.data, report)
            write_slot(slot, msgspec.structs.replace(header, sequence=sequence + 1, digest=manifest.digest))
        finally:
            slot.unlock()
        return self._reader.open(slot.path, manifest, Way("tcp"), verify=False)

    def _make_from_changes(
        self,
        manifest: WeightManifest,
        changes: Changes,
        pool: SlotPool,
        target: NDArray[np.uint8],
        on_piece: Callable[[], None],
    ) -> bool:
        """Fetch only the changes from a version that this host already has, and write the new version into ``target``,
        uint8 [bytes].

        Returns False if this host has none of ``changes.bases``, or if the result is not the version of ``manifest``.
        """
        paths = slot_paths(self._directory, manifest.job, self._host)
        if (found := lock_version(paths, manifest.layout, changes.bases)) is None:
            return False
        base, digest = found
        try:
            if (data := pool.data_of(base)) is None:
                return False
            if _digest_of_fetched(target, changes.since(digest, data), on_piece) == manifest.digest:
                return True
            reason = f"the result does not match digest {manifest.digest}"
        except WeightsError as error:
            reason = str(error)
        finally:
            base.close()
        logger.warning(
            "version %d of job '%s' is fetched whole, and not as its changes from the version with digest %s: %s",
            manifest.version, manifest.job, digest[:8], reason,
        )  # fmt: skip
        return False

    def _go_alone(self, manifest: WeightManifest, reason: str) -> None:
        """Log that this process fetches a version only for itself, and the reason."""
        logger.warning(
            "version %d of job '%s': this process fetches %d MB for itself, and not once for all of host '%s': %s",
            manifest.version, manifest.job, manifest.layout.nbytes // 10**6, self._host, reason,
        )  # fmt: skip

    def _pool(self, manifest: WeightManifest, on_piece: Callable[[], None]) -> SlotPool:
        """Return the pool of the job's slots of this layout size, including slots that other processes made."""
        key = f"{manifest.job} {manifest.layout.nbytes}"
        if key not in self._pools:
            self._pools[key] = SlotPool(
                self._directory,
                manifest.job,
                manifest.layout.nbytes,
                count=0,
                max_count=MAX_SLOTS,
                stem=slot_stem(manifest.job, self._host),
                on_piece=on_piece,
            )
        self._pools[key].refresh(on_piece)
        return self._pools[key]


def _fetch_whole(
    manifest: WeightManifest, fetch: Fetch, target: NDArray[np.uint8], on_piece: Callable[[], None]
) -> None:
    """Fetch a version into ``target``, uint8 [bytes]. Raises WeightsError if the fetch fails or the digest does not
    match."""
    if _digest_of_fetched(target, fetch, on_piece) != manifest.digest:
        raise WeightsError(f"version {manifest.version}: the fetched bytes do not match digest {manifest.digest}")


def _digest_of_fetched(target: NDArray[np.uint8], fetch: Fetch, on_piece: Callable[[], None]) -> str:
    """Fetch into ``target``, uint8 [bytes], and return its digest, which is computed while bytes arrive."""
    hasher, hashed = xxhash.xxh3_128(), 0

    def add(num_bytes: int) -> None:
        nonlocal hashed
        hasher.update(target[hashed:num_bytes].data)
        hashed = num_bytes
        on_piece()

    fetch(target, add)
    add(len(target))
    return str(hasher.hexdigest())


def _remove_unused(path: Path) -> None:
    try:
        file = LockedFile.open(path)
    except (NotFound, Unavailable):
        return
    if file.try_exclusive():
        file.unlink()
    file.close()
