"""Bulk plane: data above 1 MiB is placed in shared memory, and only a small claim check is sent over the bus.

The producer copies buffers into a segment of its pool and sends the claim; a consumer on the same host maps the segment
(without a copy), one on another host pulls over TCP. A segment is reused only after the producer released its claim
(or, for ``single_use``, after its consumer released it or died) *and* no reader holds the kernel lock: memory never
depends on a clock, so that a stalled reader never sees torn data. The content may be lost with its producer.

Calls block for at most a memory copy, except those with ``timeout_s``: use ``asyncio.to_thread`` for these.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import xxhash

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import ConfigError, DeadlineError, NotFound
from penstock.shared.protocol.claim import Claim
from penstock.shared.protocol.frame import Buffer
from penstock.shared.transport.bulk_header import PREFIX, BulkHeader, lock_content, read_header, write_header
from penstock.shared.transport.bulk_reader import Blob, BulkReader
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile, Owner, Segment, sweep
from penstock.shared.transport.bulk_server import BlobServer, ServedBlob

__all__ = ["Blob", "BulkReader", "BulkStore"]

_MIN_CAPACITY = 1 << 20
_POLL_S = 0.001


class BulkStore:
    """Pool of segments that this process writes; at most ``settings.bulk_bytes`` in total. Thread-safe.

    Serves other hosts if ``settings.bulk_host`` is set. On start it removes segments of dead stores on this host.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        sweep(settings.shm_dir, PREFIX)
        self._host = settings.host_id
        self._max_bytes = settings.bulk_bytes
        self._owner = Owner(settings.shm_dir, PREFIX)
        self._server = None
        if settings.bulk_host:
            self._server = BlobServer(settings.bulk_host, self._serve, settings.bulk_tls_server)
        self._changed = threading.Condition()
        self._segments: dict[str, Segment] = {}
        self._leased: dict[str, int] = {}  # name → generation that a consumer may still read
        self._generation = 0

    def put(
        self, buffers: Iterable[Buffer], *, digest: bool = False, single_use: bool = False, timeout_s: float = 5.0
    ) -> Claim:
        """Copy ``buffers`` consecutively into a segment and return its claim check.

        The segment stays until ``release``; with ``single_use``, until its first consumer released it or died.

        Raises:
            DeadlineError: all segments were in use for ``timeout_s``.
            ConfigError: more bytes than the size of the pool.
            Unavailable: the shared-memory directory is full.
        """
        parts = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
        nbytes = sum(part.nbytes for part in parts)
        segment = self._acquire(nbytes, timeout_s)
        end = 0
        for part in parts:
            start, end = end, end + part.nbytes
            segment.data[start:end] = part  # NumPy drops the GIL for this; a slice of a mmap would not
        checksum = xxhash.xxh3_128_hexdigest(segment.data[:nbytes].data) if digest else ""
        generation = self._leased[segment.path.name]
        write_header(segment, BulkHeader(generation, nbytes, 0, single_use))
        segment.unlock()
        claim = Claim(self._host, segment.path.name, generation, nbytes, checksum)
        if self._server is None:
            return claim
        token = self._server.token(claim.name, generation)
        return msgspec.structs.replace(claim, address=self._server.address, token=token)

    def release(self, claim: Claim) -> None:
        """Release the bytes of ``claim``: new fetches fail, and current readers may finish. Idempotent."""
        with self._changed:
            if self._leased.get(claim.name) == claim.generation:
                self._free(self._segments[claim.name])
                self._changed.notify()

    def reserve(self, nbytes: int, count: int = 1) -> None:
        """Allocate ``count`` segments for ``nbytes`` bytes each, so that no later ``put`` waits for fresh memory."""
        with self._changed:
            for _ in range(count):
                self._create(_round_up(nbytes))

    def close(self) -> None:
        """Stop serving and remove the segments. The memory of a segment lives until its last reader releases it."""
        if self._server:
            self._server.close()
        with self._changed:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._leased.clear()
            self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self, nbytes: int, timeout_s: float) -> Segment:
        """Lease a segment for ``nbytes`` bytes and lock it exclusively; return it."""
        if _round_up(nbytes) > self._max_bytes:
            raise ConfigError(f"{nbytes} bytes exceed the whole bulk pool of {self._max_bytes} (PENSTOCK_BULK_BYTES)")
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (segment := self._find(nbytes)) is None:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"waited {timeout_s:.1f} s for a bulk segment of {nbytes} bytes: {self._usage()}"
                    )
                self._changed.wait(_POLL_S)  # a reader's unlock sends no signal
            self._generation += 1
            self._leased[segment.path.name] = self._generation
            return segment

    def _find(self, nbytes: int) -> Segment | None:
        for segment in sorted(self._segments.values(), key=lambda each: each.data.nbytes):
            if segment.data.nbytes >= nbytes and self._lock_if_free(segment):
                return segment
        capacity = _round_up(nbytes)
        for segment in list(self._segments.values()):
            if self._total() + capacity <= self._max_bytes:
                break
            if self._lock_if_free(segment):  # too small: make room
                del self._segments[segment.path.name]
                segment.unlink()
                segment.close()
        if self._total() + capacity > self._max_bytes:
            return None
        segment = self._create(capacity)
        segment.try_exclusive()
        return segment

    def _lock_if_free(self, segment: Segment) -> bool:
        if segment.path.name in self._leased:
            header = read_header(segment)
            if not (header.single_use and header.taken == header.generation == self._leased[segment.path.name]):
                return False
        if not segment.try_exclusive():
            return False
        self._free(segment)
        return True

    def _free(self, segment: Segment) -> None:
        self._leased.pop(segment.path.name, None)
        write_header(segment, BulkHeader())

    def _create(self, capacity: int) -> Segment:
        segment = Segment.create(self._owner.next_path(), capacity)
        write_header(segment, BulkHeader())
        self._segments[segment.path.name] = segment
        return segment

    def _total(self) -> int:
        return sum(segment.data.nbytes for segment in self._segments.values())

    def _usage(self) -> str:
        pids = sorted({pid for segment in self._segments.values() for pid in segment.holders()})
        return (
            f"{len(self._leased)} of {len(self._segments)} segments are not released, processes {pids} hold locks, "
            f"{self._total()} of {self._max_bytes} bytes are used"
        )

    @contextlib.contextmanager
    def _serve(self, name: str, generation: int) -> Iterator[ServedBlob]:
        """Yield the content of segment ``name`` to the server; like any reader, hold a shared lock until the block
        ends."""
        with self._changed:
            if name not in self._segments:
                raise NotFound(f"no segment '{name}' here")
        file = LockedFile.open(self._owner.directory / name)
        try:
            yield ServedBlob(file.path, DATA_OFFSET, lock_content(file, generation).nbytes)
        finally:
            file.close()


def _round_up(nbytes: int) -> int:
    """Round ``nbytes`` up by at most a quarter, so that frames of similar size can use the same segment."""
    step = max(_MIN_CAPACITY, 1 << max(nbytes - 1, 0).bit_length() - 2) if nbytes > 4 else _MIN_CAPACITY
    return max(-(-nbytes // step) * step, _MIN_CAPACITY)
