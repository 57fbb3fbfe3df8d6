"""Messages between the env service and a tool process: length-prefixed JSON over a socket pair."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

__all__ = ["LENGTH", "encode", "read"]

LENGTH = struct.Struct("<I")


def encode(message: dict[str, Any]) -> bytes:
    """Encode one message with a length prefix."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def read(channel: socket.socket) -> dict[str, Any] | None:
    """Read the next message. Blocks; None once the channel is closed."""
    header = _exactly(channel, LENGTH.size)
    body = _exactly(channel, LENGTH.unpack(header)[0]) if header else b""
    return json.loads(body) if body else None


def _exactly(channel: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes; fewer if the channel closes."""
    data = b""
    while len(data) < size and (chunk := channel.recv(size - len(data))):
        data += chunk
    return data
