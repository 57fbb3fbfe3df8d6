"""Weights over TCP: a receiver on another host pulls the publisher's slot into its own memory."""

from __future__ import annotations

import ssl

from penstock.shared.errors import DeadlineError, NotFound, ProtocolError, Unavailable, WeightsError
from penstock.shared.protocol.weights import Layout, SlotRef, WeightManifest
from penstock.shared.transport.bulk_server import pull
from penstock.shared.weights.flat import check_layout
from penstock.shared.weights.local import BufferPool, LocalStaged

__all__ = ["TcpReceiver"]


class TcpReceiver:
    """Pulls what a publisher with ``settings.bulk_host`` serves; needs memory for two versions."""

    def __init__(
        self, layout: Layout | None = None, *, tls: ssl.SSLContext | None = None, timeout_s: float = 120.0
    ) -> None:
        self._layout, self._tls, self._timeout_s = layout, tls, timeout_s
        self._pool = BufferPool()

    def accepts(self, ref: SlotRef) -> bool:
        """Any served slot."""
        return ref.transport == "tcp"

    def stage(self, manifest: WeightManifest) -> LocalStaged:
        """Pull and verify.

        Raises:
            WeightsError: the publisher is gone, slow, or has another version in that slot by now.
        """
        ref = next((ref for ref in manifest.refs if self.accepts(ref)), None)
        if ref is None:
            raise WeightsError(
                f"version {manifest.version} is not served over TCP; set PENSTOCK_BULK_HOST at the trainer"
            )
        layout = check_layout(manifest.layout, self._layout)
        address, name, sequence, token = [*ref.handle.split("/"), "", "", ""][:4]
        if not sequence.isdecimal() or not token:
            raise WeightsError(f"version {manifest.version}: '{ref.handle}' is not a TCP handle")
        buffer = self._pool.take(layout.nbytes)
        try:
            pull(address, name, int(sequence), token, buffer, timeout_s=self._timeout_s, tls=self._tls)
        except (NotFound, Unavailable, DeadlineError, ProtocolError) as error:
            self._pool.give(buffer)
            raise WeightsError(f"version {manifest.version}: {error}") from None
        return LocalStaged(manifest, buffer, layout, self._pool)

    def close(self) -> None:
        """Free the spare buffer."""
        self._pool.clear()
