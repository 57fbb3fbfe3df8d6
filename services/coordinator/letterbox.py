"""Dead letters as people see them: list, look into, drop; and the draw that a replayed one stands for."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from penstock.services.coordinator.api.control import Row
from penstock.services.coordinator.deadletters import draw_of
from penstock.shared.errors import NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.parts import PART
from penstock.shared.transport.bus import Bus, Message

__all__ = ["LetterBox"]

SHOWN_BYTES = 4096
"""Most of a payload that is shown."""


class LetterBox:
    """Implements ``api.control.Letters`` on the stream DEAD. A letter's id is its sequence there."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def page(self, job: str, *, after: int, limit: int) -> list[Row]:
        """See ``Letters.page``."""
        found = await self._bus.read(subjects.DEAD, subjects.dead(job), start_seq=after + 1, headers_only=True)
        return [_row(message) for message in found if PART not in message.headers][:limit]

    async def show(self, job: str, id: int) -> Row:
        """See ``Letters.show``."""
        message = await self._get(job, id)
        return {
            **_row(message),
            "nbytes": len(message.data),
            "headers": dict(message.headers),
            "content": _text(message),
        }

    async def drop(self, job: str, id: int) -> None:
        """See ``Letters.drop``."""
        first = await self._get(job, id)
        origin = _origin(first)
        rest = await self._bus.read(subjects.DEAD, subjects.dead(job), start_seq=id + 1, headers_only=True)
        parts = [m.seq for m in rest if (place := m.headers.get(PART)) and _origin(m) == _after(origin, place)]
        for seq in (*parts, id):
            await self._bus.delete_message(subjects.DEAD, seq)

    async def draw(self, job: str, id: int) -> Draw:
        """The draw that the letter stood for. Raises NotFound: no such letter, or it stood for none."""
        message = await self._get(job, id)
        draw = _draw(message)
        if draw is None:
            raise NotFound(f"dead letter {id} stood for no draw: there is nothing to ask for again")
        return draw

    async def _get(self, job: str, id: int) -> Message:
        with contextlib.suppress(NotFound):
            message = await self._bus.get(subjects.DEAD, id)
            if message.subject == subjects.dead(job):
                return message
        raise NotFound(f"job '{job}' has no dead letter {id}")


def _row(message: Message) -> Row:
    draw, headers = _draw(message), message.headers
    return {
        "id": message.seq,
        "time": message.time,
        "stream": headers.get("Penstock-Stream", ""),
        "sequence": _number(headers.get("Penstock-Sequence")),
        "attempts": _number(headers.get("Penstock-Attempts")),
        "reason": headers.get("Penstock-Reason", ""),
        "draw": None if draw is None else str(draw),
    }


def _draw(message: Message) -> Draw | None:
    stream = message.headers.get("Penstock-Stream", "")
    return draw_of(subjects.RAW if stream == subjects.EXPERIENCE else stream, message)


def _origin(message: Message) -> tuple[str, int]:
    return message.headers.get("Penstock-Stream", ""), _number(message.headers.get("Penstock-Sequence"))


def _after(origin: tuple[str, int], place: str) -> tuple[str, int]:
    return origin[0], origin[1] + _number(place)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else 0


def _text(message: Message) -> Any:
    """The payload for people: a ticket as it reads, anything else as the start of its bytes."""
    if message.headers.get("Penstock-Stream") == subjects.TICKETS:
        with contextlib.suppress(ProtocolError):
            return msgspec.to_builtins(unpack(message.data, Ticket)[0])
    return message.data[:SHOWN_BYTES].decode("utf-8", "backslashreplace")
