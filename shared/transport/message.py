"""Messages of the bus as plain values, independent of the client library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from penstock.shared.errors import ProtocolError
from penstock.shared.transport.inbox import Raw

__all__ = ["MSG_ID", "AckInfo", "Message", "Outgoing", "from_consumer", "own_headers", "unix_time"]

MSG_ID = "Nats-Msg-Id"
"""Header by which a stream drops duplicate publishes."""
SIZE = "Nats-Msg-Size"
"""Header with the size of the data (bytes), in a message that is delivered without the data."""


@dataclass(frozen=True, slots=True)
class Message:
    """Stored message. ``time``: when it was stored (Unix seconds). ``data`` is empty if only headers are read.

    ``nbytes`` is the size of the data, also if only headers are read; 0 in a message that no consumer delivered.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str]
    seq: int
    time: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Message to publish. A message without ``msg_id`` gets a random id, so that retries are not stored twice."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    msg_id: str | None = None


@dataclass(frozen=True, slots=True)
class AckInfo:
    """Delivery metadata in the reply subject of a message."""

    stream: str
    consumer: str
    deliveries: int
    stream_seq: int
    consumer_seq: int
    time_ns: int
    pending: int


def own_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers that the publisher set, including the message id, without headers of the server or the
    transport."""
    return {
        str(key): value
        for key, value in (headers or {}).items()
        if key == MSG_ID or not (key.startswith("Nats-") or key in ("Status", "Description"))
    }


def unix_time(text: str) -> float:
    """Convert RFC 3339 with nanoseconds to Unix seconds."""
    whole, dot, rest = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + (float("0." + rest) if dot else 0.0)


def parse_ack(reply: str) -> AckInfo:
    """Parse ``$JS.ACK[.domain.account].stream.consumer.deliveries.stream_seq.consumer_seq.time.pending[.token]``."""
    tokens = reply.split(".")
    if len(tokens) >= 11:
        tokens = tokens[2:]
    elif len(tokens) != 9:
        raise ProtocolError(f"not an acknowledgement subject: '{reply}'")
    deliveries, stream_seq, consumer_seq, time_ns, pending = (int(token) for token in tokens[4:9])
    return AckInfo(tokens[2], tokens[3], deliveries, stream_seq, consumer_seq, time_ns, pending)


def from_consumer(raw: Raw) -> tuple[Message, AckInfo]:
    """Split a message that a consumer delivered into the stored message and its delivery metadata."""
    info = parse_ack(raw.reply)
    nbytes = int((raw.headers or {}).get(SIZE, len(raw.data)))
    return Message(raw.subject, raw.data, own_headers(raw.headers), info.stream_seq, info.time_ns / 1e9, nbytes), info
