"""What deletions stored anew of others: whether it may count from there, and where what stood elsewhere is now.

A deletion reads first and stores then, and the leader decides meanwhile. So what is stored anew says where it stood,
and whoever reads it asks whether it is over by then: an item is admitted once, whichever of its copies is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.services.coordinator.online.known import Known, known_of, names_in
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.interaction import RESTORED_HEADER, Feedback, FeedbackBatch
from penstock.shared.runtime.ledger import LedgerArchive
from penstock.shared.transport.bus import Bus, Message

__all__ = ["Restored", "find_restored"]


class Restored:
    """Tells of what a deletion stored anew what is over. Of what a leader has read itself it knows that without."""

    def __init__(self, bus: Bus, job: str, archive: LedgerArchive | None = None) -> None:
        self._bus, self._job, self._archive = bus, job, archive
        self._known, self._until = Known(set(), set()), 0
        """What is over, of the messages up to a sequence."""

    async def left(
        self, message: Message, items: Sequence[Feedback], is_here: Callable[[str], bool]
    ) -> Sequence[Feedback]:
        """Those of the items of a message that may be undecided. Raises Unavailable, ProtocolError.

        Args:
            is_here: whether an item was read here before.
        """
        if RESTORED_HEADER not in message.headers or all(is_here(item.id) for item in items):
            return items
        if message.seq > self._until:
            await self._look(message)
        return [item for item in items if is_here(item.id) or not self._known.has_item(item)]

    async def _look(self, message: Message) -> None:
        """Once for all that there is by now: a deletion stores many."""
        places = await _places(self._bus, self._job, message.seq)
        copies = await self._bus.get_whole(subjects.FEEDBACK, places)
        names = names_in(item for items in map(_items_of, copies.values()) for item in items)
        self._known, self._until = (
            await known_of(self._bus, self._job, names, self._archive),
            max([message.seq, *places]),
        )


async def find_restored(bus: Bus, job: str, name: str, seq: int) -> list[Feedback]:
    """The item that stood at a sequence, and was stored anew when others of its message were deleted."""
    places = await _places(bus, job, seq + 1, was=seq)
    copies = await bus.get_whole(subjects.FEEDBACK, places)
    return [item for message in copies.values() for item in _items_of(message) if item.id == name]


async def _places(bus: Bus, job: str, start_seq: int, *, was: int | None = None) -> list[int]:
    """Sequences from one on at which there is something stored anew; ``was``: of what stood there."""
    found = await bus.read(subjects.FEEDBACK, subjects.feedback(job), start_seq=start_seq, headers_only=True)
    before = ((message.seq, message.headers.get(RESTORED_HEADER, "").split()) for message in found)
    return [seq for seq, places in before if places and (was is None or str(was) in places)]


def _items_of(message: Message) -> Sequence[Feedback]:
    try:
        return unpack(message.data, FeedbackBatch)[0].items
    except ProtocolError:
        return ()
