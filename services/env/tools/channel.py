"""What the env service and a tool process say to each other: JSON with its length before it, over a socket pair."""

from __future__ import annotations

import json
import struct
from typing import Any

__all__ = ["LENGTH", "encode"]

LENGTH = struct.Struct("<I")


def encode(message: dict[str, Any]) -> bytes:
    """One message."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
