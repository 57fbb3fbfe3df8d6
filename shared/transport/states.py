"""States of a stream and of a durable consumer as clients see them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ConsumerState", "StreamState"]


@dataclass(frozen=True, slots=True)
class StreamState:
    """State of a stream. ``bytes`` counts the server's overhead; ``max_bytes`` is -1 without a limit; ``created``
    (RFC 3339) tells a stream from another one of its name; ``atomic``: it stores parts of a payload all or none.
    """

    messages: int
    bytes: int
    max_bytes: int
    first_seq: int
    last_seq: int
    created: str
    atomic: bool


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """Messages not delivered yet, delivered but not acknowledged, and delivered more than once.

    ``delivered_seq`` is the highest sequence that was ever delivered; the others are the consumer's settings.
    """

    pending: int
    ack_pending: int
    redelivered: int
    delivered_seq: int
    max_deliver: int
    ack_wait_s: float
