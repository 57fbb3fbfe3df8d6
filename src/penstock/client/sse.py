"""Reading an event stream: lines in, events out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from penstock.shared.errors import NotFound, PenstockError, ProtocolError, Unavailable

__all__ = ["EventReader", "Place", "Received"]

Place = int | str
"""Where a stream goes on: behind the event of that number, or at a cursor."""


@dataclass(frozen=True)
class Received:
    """One event; ``row`` is its data."""

    id: Place | None
    type: str
    row: dict[str, object]


class EventReader:
    """Collects the lines of one event at a time, and the last id for the next connection.

    Of a stream that is read from a number on, the ids are numbers, and what comes again after a reconnect is left out.
    """

    def __init__(self, after: Place = 0) -> None:
        self.last_id = after
        self.ended = False
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> Received | None:
        """Take one line; an event where it completes one that is to be shown.

        Raises:
            Unavailable: the server says that its source failed; connect again with ``last_id``.
            NotFound: it says that there is no such thing.
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
            place = self._place(fields["id"]) if "id" in fields else None
        except ValueError:
            raise ProtocolError("the event stream holds something that is not an event") from None
        if kind == "end" and place is None:
            self.ended = True
            return None
        if kind == "error" and place is None:
            raise _failure(row)
        if place is not None:
            if isinstance(place, int) and isinstance(self.last_id, int) and place <= self.last_id:
                return None
            self.last_id = place
        return Received(place, kind, row)

    def _place(self, id: str) -> Place:
        return int(id) if isinstance(self.last_id, int) else id


def _failure(row: dict[str, object]) -> PenstockError:
    detail = str(row.get("detail", "the server's source of events failed"))
    return NotFound(detail) if row.get("code") == "not_found" else Unavailable(detail)
