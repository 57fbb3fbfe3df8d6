"""Envelope of all bus messages, as msgpack. Messages with an unknown schema number are rejected."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.trace import current_trace

__all__ = ["MAX_INLINE_BYTES", "SCHEMA", "Envelope", "pack", "unpack"]

SCHEMA = 1
"""Version of every message layout in this package. A contract test pins the bytes of version 1."""
MAX_INLINE_BYTES = 1 << 20
"""Largest payload inside a message (bytes); larger payloads go by reference (bulk plane) or in parts."""

T = TypeVar("T", bound=msgspec.Struct)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Envelope with schema, job, kind, id, epoch and trace id around a body that only its receiver decodes."""

    schema: int
    job: str
    kind: str
    id: str
    epoch: int
    trace: str
    body: msgspec.Raw


_envelopes = msgspec.msgpack.Decoder(Envelope)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, Any] = {}


def pack(body: msgspec.Struct, *, job: str = "", id: str = "", epoch: int = 0, trace: str = "") -> bytes:
    """Return ``body`` encoded in an envelope, whose kind is the name of the body's class. ``trace`` defaults to the
    trace id of the current task."""
    raw = msgspec.Raw(_encoder.encode(body))
    return _encoder.encode(Envelope(SCHEMA, job, type(body).__name__, id, epoch, trace or current_trace(), raw))


def unpack(data: bytes | memoryview, kind: type[T]) -> tuple[T, Envelope]:
    """Decode a message that must be of ``kind``.

    Raises:
        ProtocolError: the data is not an envelope, or has another schema number, another kind, or an invalid body.
    """
    try:
        envelope = _envelopes.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not an envelope: {error}") from None
    if envelope.schema != SCHEMA:
        raise ProtocolError(
            f"schema {envelope.schema} is not understood (this build reads {SCHEMA}); upgrade the reader"
        )
    if envelope.kind != kind.__name__:
        raise ProtocolError(f"expected a {kind.__name__}, got a '{envelope.kind}'")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        return decoder.decode(envelope.body), envelope
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{kind.__name__} of job '{envelope.job}' does not decode: {error}") from None
