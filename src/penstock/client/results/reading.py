"""Conversion of JSON to structs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from penstock.shared.errors import ProtocolError

__all__ = ["many", "one"]

S = TypeVar("S")


def one(kind: type[S]) -> Callable[[Any], S]:
    """Return a reader of replies of type ``kind``; it raises ProtocolError if the server is too old or too new."""

    def read(data: Any) -> S:
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the server's {kind.__name__} does not fit this client: {error}") from None

    return read


def many(kind: type[S]) -> Callable[[Any], list[S]]:
    """Return a reader of replies that list values of type ``kind``; it raises ProtocolError as for ``one``."""
    each = one(kind)

    def read(data: Any) -> list[S]:
        rows = data.get("data") if isinstance(data, dict) else None
        if not isinstance(rows, list):
            raise ProtocolError(f"the server's reply is no list of {kind.__name__}")
        return [each(row) for row in rows]

    return read
