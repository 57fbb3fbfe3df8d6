"""Reading an event stream: lines in, events out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from penstock.shared.errors import ProtocolError, Unavailable

__all__ = ["EventReader", "Received"]


@dataclass(frozen=True)
class Received:
    """One event; ``row`` is its data."""

    id: int | None
    type: str
    row: dict[str, object]


class EventReader:
    """Collects the lines of one event at a time, and the last id for the next connection."""

    def __init__(self, after: int = 0) -> None:
        self.last_id = after
        self.ended = False
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> Received | None:
        """Take one line; an event where it completes one that is to be shown.

        Raises:
            Unavailable: the server says that its source failed; connect again with ``last_id``.
        """
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data" and "data" in self._fields:
                value = f"{self._fields['data']}\n{value}"
            self._fields[name] = value
            return None
        fields, self._fields = self._fields, {}
        return self._complete(fields) if "data" in fields else None

    def _complete(self, fields: dict[str, str]) -> Received | None:
        kind = fields.get("event", "message")
        try:
            row = orjson.loads(fields["data"])
            number = int(fields["id"]) if "id" in fields else None
        except ValueError:
            raise ProtocolError("the event stream holds something that is not an event") from None
        if kind == "end" and number is None:
            self.ended = True
            return None
        if kind == "error" and number is None:
            raise Unavailable(str(row.get("detail", "the server's source of events failed")))
        if number is not None:
            if number <= self.last_id:  # a repetition after a reconnect
                return None
            self.last_id = number
        return Received(number, kind, row)
