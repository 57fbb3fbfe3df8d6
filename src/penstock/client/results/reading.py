"""Conversion of JSON to structs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from penstock.shared.errors import ProtocolError

__all__ = ["many", "one"]

S = TypeVar("S")


def one(kind: type[S]) -> Callable[[Any], S]:
    """Return a function that converts JSON replies to ``kind``. It raises ProtocolError if server and client versions
    do not match."""

    def read(data: Any) -> S:
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the server's {kind.__name__} does not fit this client: {error}") from None

    return read


def many(kind: type[S]) -> Callable[[Any], list[S]]:
    """Return a function that converts JSON replies with a list to values of type ``kind``. It raises ProtocolError as
    ``one`` does."""
    each = one(kind)

    def read(data: Any) -> list[S]:
        rows = data.get("data") if isinstance(data, dict) else None
        if not isinstance(rows, list):
            raise ProtocolError(f"the server's reply is no list of {kind.__name__}")
        return [each(row) for row in rows]

    return read
