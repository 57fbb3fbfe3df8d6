"""Weights over TCP: a receiver on another host pulls the publisher's slot, once for all processes of its host."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

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
from penstock.shared.weights.flat import check_layout
from penstock.shared.weights.host_copies import HostCopies
from penstock.shared.weights.local import BufferPool, LocalStaged

__all__ = ["TcpReceiver"]


class TcpReceiver:
    """Pulls versions from a publisher on another host (one with ``settings.bulk_host``) into a slot, which every
    process of this host reads.

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
        shared = self._copies.stage(
            manifest, lambda target, on_bytes: self._pull(manifest, ref, target, end, on_bytes), end=end
        )
        if shared is not None:
            return shared
        buffer = self._pool.take(layout.nbytes)
        try:
            self._pull(manifest, ref, buffer, end)
        except WeightsError:
            self._pool.give(buffer)
            raise
        return LocalStaged(manifest, buffer, layout, self._pool, Way("tcp", layout.nbytes))

    def close(self) -> None:
        """Free the spare buffer, and the copies of this host that no process uses."""
        self._pool.clear()
        self._copies.close()

    def _pull(
        self,
        manifest: WeightManifest,
        ref: SlotRef,
        target: NDArray[np.uint8],
        end: float,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        address, name, sequence, token = [*ref.handle.split("/"), "", "", ""][:4]
        if not sequence.isdecimal() or not token:
            raise WeightsError(f"version {manifest.version}: '{ref.handle}' is not a TCP handle")
        try:
            left_s = max(end - time.monotonic(), 0.1)
            pull(address, name, int(sequence), token, target, timeout_s=left_s, tls=self._tls, on_bytes=on_bytes)
        except (NotFound, ProtocolError) as error:
            raise WeightsError(f"version {manifest.version}: {error}") from None
        except (Unavailable, DeadlineError) as error:  # a trainer that starts again publishes without being asked
            raise UnreadableWeights(f"version {manifest.version}: {error}") from None
