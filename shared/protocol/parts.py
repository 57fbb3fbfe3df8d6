"""Payloads above 1 MiB as consecutive messages of one stream, stored atomically.

The first part has the headers of the whole and ``Penstock-Parts``, the number of messages. The others are published on
a separate subject, so that followers see one message per payload; they have ``Penstock-Part``, their index from 1.
The stream sequence number of part ``i`` is that of the first part plus ``i``.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.codec import MAX_INLINE_BYTES

__all__ = ["MAX_PARTS", "PART", "PARTS", "count_of", "num_parts", "part_subject"]

PARTS = "Penstock-Parts"
PART = "Penstock-Part"
MAX_PARTS = 1000
"""Largest number of messages that NATS stores atomically."""


def part_subject(subject: str) -> str:
    """Return the subject of the second and later parts of a payload whose first part is on ``subject``."""
    return f"{subject}.part"


def num_parts(nbytes: int) -> int:
    """Return the number of messages of a payload of ``nbytes`` bytes."""
    return max(1, -(-nbytes // MAX_INLINE_BYTES))


def count_of(headers: Mapping[str, str]) -> int:
    """Return the number of messages that hold a payload; ``headers`` are the headers of the first of these messages.

    Raises:
        ProtocolError: the header is not a number from 2 to 1000.
    """
    text = headers.get(PARTS)
    if text is None:
        return 1
    if not (text.isascii() and text.isdigit() and len(text) < 5) or not 2 <= int(text) <= MAX_PARTS:
        raise ProtocolError(f"header {PARTS} is '{text}'; it must be a number from 2 to {MAX_PARTS}")
    return int(text)
