"""Frames as messages: a small frame is part of the message; for a large frame, the message has only a claim check.

A claimed segment of memory stays until the sender releases the message. A reader that has opened the message keeps the
segment even longer, until it releases its blob or dies.
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
    """Message body that refers to a frame in the bulk plane."""

    claim: Claim


def is_large(frame: Sequence[Buffer]) -> bool:
    """Return True if a frame is sent through the bulk plane."""
    return sum(len(buffer) for buffer in frame) > MAX_INLINE_BYTES


class Sent:
    """A frame packed as a message. Call ``release`` once no further reader will open the message."""

    def __init__(self, data: bytes, store: BulkStore | None = None, claim: Claim | None = None) -> None:
        self.data = data
        self._store, self._claim = store, claim

    def release(self) -> None:
        """Release the memory of the frame; current readers may finish. Idempotent."""
        if self._store is not None and self._claim is not None:
            self._store.release(self._claim)


class FrameMail:
    """Packs frames into messages and opens them; one object per process. Thread-safe.

    Operations on the bulk plane block for a memory copy or a transfer: call them in a thread.
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
        """Pack a frame into a message.

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
        """Return the frame of a message as a blob. Arrays in the frame are valid until the blob is released.

        Raises:
            NotFound: the sender released or lost the frame.
            Unavailable: the sender's host cannot be reached.
            ProtocolError: the data is neither a frame nor a claim check.
        """
        if is_frame(data):
            return Blob(np.frombuffer(data, np.uint8), lambda: None)
        return self._reader.fetch(unpack(data, BulkFrame)[0].claim)

    def check(self, nbytes: int, peer_host: str, what: str) -> None:
        """Check that this process can send frames of up to ``nbytes`` bytes to ``peer_host``.

        ``what`` names the frames in the message of an error.

        Raises:
            ConfigError: the frames are too large, or cannot leave this host; the message names the setting.
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
        """Remove all packed frames and release all opened ones."""
        self._reader.close()
        self._store.close()
