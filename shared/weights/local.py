"""Versions staged in private memory of the process, for transports that copy."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import Layout, WeightManifest
from penstock.shared.weights.base import Way
from penstock.shared.weights.flat import digest_of, view

__all__ = ["BufferPool", "LocalStaged"]


class BufferPool:
    """Keeps one released buffer for reuse, because writing to used memory is several times faster than writing to new
    memory."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._spare: NDArray[np.uint8] | None = None

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a buffer, uint8 [nbytes], with undefined content."""
        with self._mutex:
            spare, self._spare = self._spare, None
        return spare if spare is not None and spare.nbytes == nbytes else np.empty(nbytes, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Return an unused buffer to the pool."""
        with self._mutex:
            self._spare = buffer

    def clear(self) -> None:
        """Free the memory."""
        with self._mutex:
            self._spare = None


class LocalStaged:
    """Version in a private buffer."""

    def __init__(
        self, manifest: WeightManifest, buffer: NDArray[np.uint8], layout: Layout, pool: BufferPool, way: Way
    ) -> None:
        """Verify ``buffer``.

        Raises:
            WeightsError: its digest differs from the manifest's; the buffer returns to the pool.
        """
        self.manifest, self.way = manifest, way
        self._pool = pool
        self._buffer: NDArray[np.uint8] | None = buffer
        if digest_of(buffer) != manifest.digest:
            self.release()
            raise WeightsError(f"version {manifest.version}: the bytes do not match digest {manifest.digest}")
        self._tensors = view(buffer, layout)

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the buffer."""
        return self._tensors

    def intact(self) -> bool:
        """Return True: no other process can write to private memory."""
        return True

    def release(self) -> None:
        """Return the buffer to the pool for the next version."""
        if self._buffer is not None:
            self._pool.give(self._buffer)
            self._buffer, self._tensors = None, {}
