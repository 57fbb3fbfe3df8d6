"""Versions staged in memory of this process, for transports that copy."""

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
    """Keeps one released buffer: memory that the process already has fills several times faster than new memory."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._spare: NDArray[np.uint8] | None = None

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer, uint8 [nbytes], with any content."""
        with self._mutex:
            spare, self._spare = self._spare, None
        return spare if spare is not None and spare.nbytes == nbytes else np.empty(nbytes, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer that nobody reads any more."""
        with self._mutex:
            self._spare = buffer

    def clear(self) -> None:
        """Free the memory."""
        with self._mutex:
            self._spare = None


class LocalStaged:
    """A version in a private buffer."""

    def __init__(
        self, manifest: WeightManifest, buffer: NDArray[np.uint8], layout: Layout, pool: BufferPool, way: Way
    ) -> None:
        """Verify ``buffer``.

        Raises:
            WeightsError: it does not have the digest of the manifest; it goes back to the pool.
        """
        self.manifest, self.way = manifest, way
        self._pool = pool
        self._buffer: NDArray[np.uint8] | None = buffer
        if digest_of(buffer) != manifest.digest:
            self.release()
            raise WeightsError(f"version {manifest.version}: the bytes do not match digest {manifest.digest}")
        self._tensors = view(buffer, layout)

    def tensors(self) -> dict[str, Tensor]:
        """Views of the buffer."""
        return self._tensors

    def intact(self) -> bool:
        """Always: nobody else can write here."""
        return True

    def release(self) -> None:
        """Give the buffer to the next version."""
        if self._buffer is not None:
            self._pool.give(self._buffer)
            self._buffer, self._tensors = None, {}
