"""Dead letters as they lie in DEAD: where they were before, and which messages of DEAD are one of them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.services.coordinator.carrier import SEQUENCE, STREAM
from penstock.shared.protocol import subjects
from penstock.shared.protocol.parts import PART
from penstock.shared.transport.bus import Bus, Message

__all__ = ["Buried", "buried", "number", "origin_of", "payload_of"]


@dataclass(frozen=True, slots=True)
class Buried:
    """A dead letter.

    Attributes:
        first: its first message; of parts that lie there without it the first of these.
        places: of each of its messages the place in the payload, from 0, and the sequence in DEAD.
    """

    first: Message
    places: list[tuple[int, int]]

    @property
    def job(self) -> str:
        """Whose it is."""
        return self.first.subject.rpartition(".")[2]

    @property
    def stream(self) -> str:
        """Where it was."""
        return origin_of(self.first)[0]


async def buried(bus: Bus, job: str, *, start_seq: int = 1) -> list[Buried]:
    """The dead letters of a job (`*`: of all), oldest first, without their payloads. Raises Unavailable."""
    found, rest = dict[tuple[str, str, int], Buried](), list[Message]()
    letters = list[Buried]()
    for message in await bus.read(subjects.DEAD, subjects.dead(job), start_seq=start_seq, headers_only=True):
        if PART in message.headers:
            rest.append(message)
            continue
        letters.append(Buried(message, [(0, message.seq)]))
        found[message.subject, *origin_of(message)] = letters[-1]
    for message in rest:
        stream, seq = origin_of(message)
        place = number(message.headers[PART])
        key = message.subject, stream, seq - place
        if key in found:
            found[key].places.append((place, message.seq))
        else:
            letters.append(Buried(message, [(place, message.seq)]))
    return letters


async def payload_of(bus: Bus, letter: Buried) -> tuple[bytes, int]:
    """``(what is there of a payload, in how many parts)``. Raises Unavailable."""
    places = dict(letter.places)
    found = await bus.get_many(subjects.DEAD, places.values())
    pieces = [found[places[place]].data for place in sorted(places) if places[place] in found]
    return b"".join(pieces), len(pieces)


def origin_of(message: Message) -> tuple[str, int]:
    """Stream and sequence of what a message of DEAD is a copy of."""
    return message.headers.get(STREAM, ""), number(message.headers.get(SEQUENCE))


def number(text: str | None) -> int:
    """A count in a header; 0 for what is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else 0
