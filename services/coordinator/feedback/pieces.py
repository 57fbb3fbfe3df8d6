"""Finds and erases the messages that hold one payload, including those that an interrupted deletion left."""

from __future__ import annotations

from penstock.services.coordinator.leader.dead_letters import DeadLetter
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.parts import PART, count_of, part_subject
from penstock.shared.transport.bus import Bus, Message

__all__ = ["data_of", "erase_dead_letter", "erase_message", "pieces_of"]


async def pieces_of(bus: Bus, stream: str, first: Message) -> list[Message]:
    """Return the messages of a payload that still exist, in order. Raises Unavailable."""
    try:
        count = count_of(first.headers)
    except ProtocolError:  # treat it as a single message
        return [first]
    found = await bus.get_many(stream, range(first.seq + 1, first.seq + count))
    rest = (found[seq] for seq in sorted(found))
    subject = part_subject(first.subject)
    return [first, *(m for m in rest if m.subject == subject and m.headers.get(PART) == str(m.seq - first.seq))]


async def data_of(bus: Bus, stream: str, first: Message) -> bytes:
    """Return the stored parts of a payload, joined. Raises Unavailable."""
    return b"".join(piece.data for piece in await pieces_of(bus, stream, first))


async def erase_message(bus: Bus, stream: str, first: Message) -> None:
    """Overwrite and delete the messages of a payload, the first message last: if the deletion is interrupted, a later
    search finds the remaining messages by the first one."""
    for piece in reversed(await pieces_of(bus, stream, first)):
        await bus.delete_message(stream, piece.seq)


async def erase_dead_letter(bus: Bus, dead_letter: DeadLetter) -> None:
    """Overwrite and delete the messages of a dead letter, the first one last."""
    for _, seq in reversed(dead_letter.places):
        await bus.delete_message(subjects.DEAD, seq)
