"""Weights over TCP: one process per receiving host pulls the publisher's slot, for all processes of its host."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import (
    DeadlineError,
    NotFound,
    ProtocolError,
    Unavailable,
    UnreadableWeights,
    WeightsError,
)
from penstock.shared.protocol.weights import Layout, SlotRef, WeightManifest
from penstock.shared.transport.bulk_server import pull
from penstock.shared.weights.base import Staged, Way
from penstock.shared.weights.delta import BUCKET_BYTES, apply
from penstock.shared.weights.flat import check_layout
from penstock.shared.weights.host_copies import Changes, Fetch, HostCopies
from penstock.shared.weights.local import BufferPool, LocalStaged

__all__ = ["TcpReceiver"]

_NUM_THREADS = 2
"""Number of buckets whose changes are fetched at a time: while one is compared or applied, another one travels."""


class TcpReceiver:
    """Pulls versions from a publisher on another host (with ``settings.bulk_host``) into a slot that all processes of
    this host read. If a slot of this host has a version from which the publisher offers changes, only the changes are
    pulled.

    If that fails, for lack of shared memory or because the fetching process stalls, it pulls into private memory.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        layout: Layout | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._layout, self._tls, self._timeout_s = layout, tls, timeout_s
        self._copies = HostCopies(settings, layout)
        self._pool = BufferPool()

    def accepts(self, ref: SlotRef) -> bool:
        """Return True if ``ref`` names a slot that its publisher serves over TCP."""
        return ref.transport == "tcp"

    def stage(self, manifest: WeightManifest) -> Staged:
        """Pull and verify the version, or open the copy that another process of this host pulled; return it.

        Raises:
            WeightsError: the publisher has another version in that slot by now.
            UnreadableWeights: the publisher cannot be reached, or is slow.
        """
        ref = next((ref for ref in manifest.refs if self.accepts(ref)), None)
        if ref is None:
            raise WeightsError(
                f"version {manifest.version} is not served over TCP; set PENSTOCK_BULK_HOST at the trainer"
            )
        layout = check_layout(manifest.layout, self._layout)
        end = time.monotonic() + self._timeout_s
        transfer = _Transfer(manifest, ref, end, self._tls)
        shared = self._copies.stage(manifest, transfer.whole, end=end, changes=transfer.changes)
        if shared is not None:
            shared.way = Way("tcp", transfer.num_bytes)
            return shared
        buffer = self._pool.take(layout.nbytes)
        try:
            transfer.whole(buffer)
        except WeightsError:
            self._pool.give(buffer)
            raise
        return LocalStaged(manifest, buffer, layout, self._pool, Way("tcp", transfer.num_bytes))

    def close(self) -> None:
        """Free the spare buffer, and the copies of this host that no process uses."""
        self._pool.clear()
        self._copies.close()


class _Transfer:
    """Transfer of one version from its publisher: all bytes, or only the changes from another version.

    ``num_bytes`` counts the received bytes.
    """

    def __init__(self, manifest: WeightManifest, ref: SlotRef, end: float, tls: ssl.SSLContext | None) -> None:
        """Read the handle of ``ref``: address, slot, sequence, token, and the digests of other versions, if any.

        ``end``: deadline (monotonic).

        Raises:
            WeightsError: it is not a handle.
        """
        parts = ref.handle.split("/")
        if len(parts) < 4 or not parts[2].isdecimal() or not parts[3]:
            raise WeightsError(f"version {manifest.version}: '{ref.handle}' is not a TCP handle")
        self._address, self._slot, sequence, self._token, *bases = parts
        self._version, self._sequence, self._end, self._tls = manifest.version, int(sequence), end, tls
        self.changes = Changes(bases, self._since) if bases else None
        self.num_bytes = 0

    def whole(self, target: NDArray[np.uint8], on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Pull the version into ``target``, uint8 [bytes]; see ``Fetch``."""
        self.num_bytes += self._pull(self._slot, target, on_bytes)

    def _since(self, digest: str, base: NDArray[np.uint8]) -> Fetch:
        """Return a function that fetches the changes from the version with ``digest``, whose bytes are ``base``, uint8
        [bytes]."""

        def fetch(target: NDArray[np.uint8], on_bytes: Callable[[int], None]) -> None:
            def make(start: int) -> tuple[int, int]:
                """Write one bucket of the version; return its end (byte offset), and the number of received bytes."""
                stop = min(start + BUCKET_BYTES, len(target))
                bucket = target[start:stop]
                received = self._pull(f"{self._slot}?{digest}/{start}/{stop}", bucket, exact=False)
                if received < len(bucket):  # else the bucket came whole
                    apply(base[start:stop], bucket[:received].copy(), bucket)
                return stop, received

            with ThreadPoolExecutor(_NUM_THREADS, "weight-delta") as threads:
                for stop, received in threads.map(make, range(0, len(target), BUCKET_BYTES)):
                    self.num_bytes += received
                    on_bytes(stop)

        return fetch

    def _pull(
        self,
        name: str,
        target: NDArray[np.uint8],
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        *,
        exact: bool = True,
    ) -> int:
        """Pull a blob into ``target`` and return its size; see ``pull``. Raises WeightsError."""
        left_s = max(self._end - time.monotonic(), 0.1)
        try:
            return pull(
                self._address, name, self._sequence, self._token, target,
                timeout_s=left_s, tls=self._tls, on_bytes=on_bytes, exact=exact,
            )  # fmt: skip
        except (NotFound, ProtocolError) as error:
            raise WeightsError(f"version {self._version}: {error}") from None
        except (Unavailable, DeadlineError) as error:  # a trainer that starts again publishes without being asked
            raise UnreadableWeights(f"version {self._version}: {error}") from None
