"""Dead letters as people see them: list, look into, drop; and what a replayed one stands for."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from penstock.services.coordinator.api.control import Row
from penstock.services.coordinator.buried import Buried, buried, number, origin_of, payload_of
from penstock.services.coordinator.carrier import ATTEMPTS, LETTER, REASON
from penstock.services.coordinator.deadletters import draw_of
from penstock.services.coordinator.supply import LiveDeadLetter
from penstock.shared.errors import NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.parts import PART, PARTS, count_of
from penstock.shared.transport.bus import MSG_ID, Bus, Message

__all__ = ["LetterBox"]

LIVE = frozenset({subjects.INTERACTIONS, subjects.FEEDBACK})
"""Streams whose letters stand for no draw, and for themselves."""
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
        for _, seq in reversed((await self._find(job, id)).places):
            await self._bus.delete_message(subjects.DEAD, seq)

    async def check_replayable(self, job: str, id: int) -> None:
        """See ``Letters.check_replayable``."""
        if origin_of(await self._get(job, id))[0] not in LIVE:
            await self.draw(job, id)

    async def live(self, job: str, id: int) -> LiveDeadLetter | None:
        """The interaction or the feedback that the letter is, as it was; None where it is neither.

        Raises:
            NotFound: no such letter.
            ProtocolError: it has several parts, and not all of them are there.
        """
        stream, seq = origin_of(await self._get(job, id))
        if stream not in LIVE:
            return None
        letter = await self._find(job, id)
        data, count = await payload_of(self._bus, letter)
        missing = count_of(letter.first.headers) - count
        if missing:
            raise ProtocolError(f"{missing} parts of dead letter {id} are missing: {subjects.DEAD} was full")
        headers = {name: value for name, value in letter.first.headers.items() if name not in {*LETTER, PARTS, MSG_ID}}
        return LiveDeadLetter(stream, seq, headers, data)

    async def draw(self, job: str, id: int) -> Draw:
        """The draw that the letter stood for. Raises NotFound: no such letter, or it stood for none."""
        message = await self._get(job, id)
        draw = _draw(message)
        if draw is None:
            raise NotFound(f"dead letter {id} stood for no draw: there is nothing to ask for again")
        return draw

    async def _find(self, job: str, id: int) -> Buried:
        for letter in await buried(self._bus, job, start_seq=id):
            if letter.first.seq == id:
                return letter
        raise NotFound(f"job '{job}' has no dead letter {id}")

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
        "stream": origin_of(message)[0],
        "sequence": origin_of(message)[1],
        "attempts": number(headers.get(ATTEMPTS)),
        "reason": headers.get(REASON, ""),
        "draw": None if draw is None else str(draw),
    }


def _draw(message: Message) -> Draw | None:
    stream, _ = origin_of(message)
    return draw_of(subjects.RAW if stream == subjects.EXPERIENCE else stream, message)


def _text(message: Message) -> Any:
    """The payload for people: a ticket as it reads, anything else as the start of its bytes."""
    if origin_of(message)[0] == subjects.TICKETS:
        with contextlib.suppress(ProtocolError):
            return msgspec.to_builtins(unpack(message.data, Ticket)[0])
    return message.data[:SHOWN_BYTES].decode("utf-8", "backslashreplace")
