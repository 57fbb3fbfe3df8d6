"""Payloads in parts: split before publishing, joined after reading."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.parts import PART, PARTS, count_of, num_parts, part_subject
from penstock.shared.transport.message import Message, Outgoing

__all__ = ["cut", "whole"]


def cut(message: Outgoing) -> list[Outgoing]:
    """Split a payload into messages of at most ``MAX_INLINE_BYTES``; a payload within this limit stays one message."""
    count = num_parts(len(message.data))
    if count == 1:
        return [message]
    view = memoryview(message.data)
    pieces = [bytes(view[start : start + MAX_INLINE_BYTES]) for start in range(0, len(view), MAX_INLINE_BYTES)]
    first = Outgoing(message.subject, pieces[0], {**message.headers, PARTS: str(count)}, message.msg_id)
    rest = [
        Outgoing(part_subject(message.subject), piece, {PART: str(place)}, f"{message.msg_id}/{place}")
        for place, piece in enumerate(pieces[1:], 1)
    ]
    return [first, *rest]


def whole(first: Message, found: Mapping[int, Message]) -> Message | None:
    """Return the payload whose first part is ``first``, joined with its later parts; None if a part is missing.

    ``found`` has the messages to take the later parts from, by stream sequence number.

    Raises:
        ProtocolError: the header that counts the parts is malformed.
    """
    count = count_of(first.headers)
    if count == 1:
        return first
    pieces = [first.data]
    for place in range(1, count):
        part = found.get(first.seq + place)
        if part is None or part.subject != part_subject(first.subject) or part.headers.get(PART) != str(place):
            return None
        pieces.append(part.data)
    headers = {name: value for name, value in first.headers.items() if name != PARTS}
    return Message(first.subject, b"".join(pieces), headers, first.seq, first.time)
