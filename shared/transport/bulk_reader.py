"""Consumer side of the bulk plane: fetches the bytes of a claim check."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import ProtocolError, Unavailable
from penstock.shared.protocol.claim import Claim
from penstock.shared.transport.bulk_header import SEGMENT_NAME, lock_content
from penstock.shared.transport.bulk_segment import DATA_OFFSET, LockedFile, map_file
from penstock.shared.transport.bulk_server import pull

__all__ = ["Blob", "BulkReader"]

_MAX_MAPPINGS = 64


class Blob:
    """Fetched bytes: ``data`` (read-only if it is shared memory) is valid and constant until ``release``.

    Use it as a context manager, or release it after the last use of the arrays made from ``data``.
    """

    def __init__(self, array: NDArray[np.uint8], on_release: Callable[[], None]) -> None:
        self.data: memoryview = array.data
        self._on_release: Callable[[], None] | None = on_release

    def release(self) -> None:
        """Release the memory for reuse. Idempotent."""
        if self._on_release is not None:
            self._on_release()
            self._on_release = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class BulkReader:
    """Fetches claims; caches mappings of segments. Thread-safe."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._host = settings.host_id
        self._directory = settings.shm_dir
        self._tls = settings.bulk_tls_client
        self._mutex = threading.Lock()
        self._mappings: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()
        # Holds the locks: a blob that is dropped without release keeps its segment instead of losing the lock.
        self._locks: dict[int, LockedFile] = {}
        self._spare = np.empty(0, np.uint8)

    def fetch(self, claim: Claim, *, timeout_s: float = 10.0, verify: bool = True) -> Blob:
        """Fetch the bytes of ``claim``. With ``verify``, compare their digest with the digest in the claim, if the
        claim has a digest.

        Same host: takes microseconds. Another host: blocks for the transfer, at most ``timeout_s``.

        Raises:
            NotFound: the producer released or lost the bytes.
            Unavailable: the producer cannot be reached, or serves only its own host.
            DeadlineError: the transfer took longer than ``timeout_s``.
            ProtocolError: the bytes do not match the claim.
        """
        if claim.host == self._host:
            blob = self._map(claim)
        elif claim.address:
            blob = self._pull(claim, timeout_s)
        else:
            raise Unavailable(
                f"'{claim.name}' lies on host '{claim.host}', which serves no other host; set PENSTOCK_BULK_HOST there"
            )
        if verify and claim.digest and xxhash.xxh3_128_hexdigest(blob.data) != claim.digest:
            blob.release()
            raise ProtocolError(f"the {claim.nbytes} bytes of '{claim.name}' do not match their digest")
        return blob

    def close(self) -> None:
        """Release every blob and drop the mappings."""
        with self._mutex:
            while self._locks:
                self._locks.popitem()[1].close()
            self._mappings.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _map(self, claim: Claim) -> Blob:
        if not SEGMENT_NAME.fullmatch(claim.name):
            raise ProtocolError(f"'{claim.name}' is not the name of a bulk segment")
        lock = LockedFile.open(self._directory / claim.name)
        header = lock_content(lock, claim.generation)
        if header.nbytes != claim.nbytes:
            lock.close()
            raise ProtocolError(f"'{claim.name}' holds {header.nbytes} bytes, the claim says {claim.nbytes}")
        data = self._mapping(claim.name, lock)
        with self._mutex:
            self._locks[lock.fd] = lock
        return Blob(data[: claim.nbytes], lambda: self._unlock(lock))

    def _unlock(self, lock: LockedFile) -> None:
        with self._mutex:
            self._locks.pop(lock.fd, None)
            lock.close()

    def _mapping(self, name: str, file: LockedFile) -> NDArray[np.uint8]:
        """Return the data part of a segment, mapped now or before. Segment names are never reused, so a cached mapping
        is always of the right file."""
        with self._mutex:
            known = self._mappings.get(name)
            if known is not None:
                self._mappings.move_to_end(name)
                return known
            for other in [other for other in self._mappings if not (self._directory / other).exists()]:
                del self._mappings[other]
            if len(self._mappings) >= _MAX_MAPPINGS:
                self._mappings.popitem(last=False)
            data = np.frombuffer(map_file(file.fd, "read"), np.uint8)[DATA_OFFSET:]
            self._mappings[name] = data
            return data

    def _pull(self, claim: Claim, timeout_s: float) -> Blob:
        with self._mutex:
            buffer, self._spare = self._spare, np.empty(0, np.uint8)
        if buffer.nbytes < claim.nbytes:
            buffer = np.empty(claim.nbytes, np.uint8)
        pull(
            claim.address, claim.name, claim.generation, claim.token, buffer[: claim.nbytes], timeout_s=timeout_s,
            tls=self._tls,
        )  # fmt: skip
        return Blob(buffer[: claim.nbytes], lambda: self._recycle(buffer))

    def _recycle(self, buffer: NDArray[np.uint8]) -> None:
        """Keep the largest released buffer for reuse, because allocating new memory is slower than a fast network."""
        with self._mutex:
            if buffer.nbytes > self._spare.nbytes:
                self._spare = buffer
