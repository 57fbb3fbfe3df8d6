"""Frames as messages: a small one inline, a large one in the bulk plane with its claim check in its place.

What a claim leads to belongs to its sender until it releases it; a reader that holds it keeps the memory whatever the
sender does, and a reader that dies gives it back by dying.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.claim import Claim
from penstock.shared.protocol.codec import MAX_INLINE_BYTES, pack, unpack
from penstock.shared.protocol.frame import Buffer, is_frame
from penstock.shared.transport.bulk import Blob, BulkReader, BulkStore

__all__ = ["BulkFrame", "FrameMail", "Sent", "is_large"]


class BulkFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Stands for a frame that lies in the bulk plane."""

    claim: Claim


def is_large(frame: Sequence[Buffer]) -> bool:
    """True if a frame goes through the bulk plane."""
    return sum(len(buffer) for buffer in frame) > MAX_INLINE_BYTES


class Sent:
    """A frame as a message. ``release`` it once nobody will read it for the first time any more."""

    def __init__(self, data: bytes, store: BulkStore | None = None, claim: Claim | None = None) -> None:
        self.data = data
        self._store, self._claim = store, claim

    def release(self) -> None:
        """Give the memory back; who is reading it keeps it. May be called twice."""
        if self._store is not None and self._claim is not None:
            self._store.release(self._claim)


class FrameMail:
    """Packs and opens frames; one for each process. Thread-safe.

    What concerns the bulk plane blocks, for a memory copy or a transfer: call it in a thread.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.host = settings.host_id
        self._settings = settings
        self._store, self._reader = BulkStore(settings), BulkReader(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pack(self, frame: Sequence[Buffer], *, job: str) -> Sent:
        """The message for a frame.

        Raises:
            DeadlineError: the whole bulk pool is in use.
            Unavailable: the shared-memory directory is full.
            ConfigError: the frame is larger than the pool.
        """
        if not is_large(frame):
            return Sent(b"".join(frame))
        claim = self._store.put(frame)
        return Sent(pack(BulkFrame(claim=claim), job=job), self._store, claim)

    def open(self, data: bytes) -> Blob:
        """The frame of a message; its arrays are valid until the blob is released.

        Raises:
            NotFound: its sender released or lost it.
            Unavailable: it lies on a host that cannot be reached.
            ProtocolError: neither a frame nor a claim check.
        """
        if is_frame(data):
            return Blob(np.frombuffer(data, np.uint8), lambda: None)
        return self._reader.fetch(unpack(data, BulkFrame)[0].claim)

    def check(self, nbytes: int, peer_host: str, what: str) -> None:
        """Refuse frames of up to ``nbytes`` bytes for ``peer_host`` that could never be sent.

        Raises:
            ConfigError: names the setting.
        """
        settings = self._settings
        if nbytes <= MAX_INLINE_BYTES:
            return
        if 2 * nbytes > settings.bulk_bytes:
            raise ConfigError(
                f"{what} takes {nbytes} bytes, and two of them must fit into the bulk pool of {settings.bulk_bytes}: "
                "raise PENSTOCK_BULK_BYTES, or ask for less at once"
            )
        if peer_host not in ("", settings.host_id) and not settings.bulk_host:
            raise ConfigError(
                f"{what} takes {nbytes} bytes, and '{settings.host_id}' serves no other host than itself "
                f"('{peer_host}' asks): set PENSTOCK_BULK_HOST there"
            )

    def close(self) -> None:
        """Remove what was packed and release what was opened."""
        self._reader.close()
        self._store.close()
