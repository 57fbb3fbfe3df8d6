"""Reads the payload of a stream message that may consist of several parts."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.shared.errors import NotFound
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.parts import count_of
from penstock.shared.transport.bus import Bus, Message

__all__ = ["whole_of"]

T = TypeVar("T", bound=msgspec.Struct)


async def whole_of(bus: Bus, stream: str, message: Message, kind: type[T]) -> T:
    """Return the decoded payload of ``message``. If the payload spans several messages, join its parts first.

    Raises:
        ProtocolError: the payload does not decode.
        NotFound: a part was deleted.
        Unavailable: the bus does not answer.
    """
    data = message.data
    if count_of(message.headers) > 1:
        found = await bus.get_whole(stream, [message.seq])
        if message.seq not in found:
            raise NotFound("a part of it is missing")
        data = found[message.seq].data
    return unpack(data, kind)[0]
