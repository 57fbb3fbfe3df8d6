"""What is known of a job's live material, wherever it stands: read from end to end, where memory does not reach."""

from __future__ import annotations

from typing import NamedTuple

from penstock.services.coordinator.feedback.erasure import UNDECIDED
from penstock.services.coordinator.feedback.leaders import Leaders
from penstock.services.coordinator.feedback.pieces import data_of
from penstock.services.coordinator.online.episode import CUT
from penstock.services.coordinator.online.names import canonical
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import Admitted, decode_events
from penstock.shared.protocol.interaction import Erasure, FateBatch, Feedback, Interaction
from penstock.shared.transport.bus import Bus

__all__ = ["Known", "known_of"]


class Known(NamedTuple):
    """Ids of interactions and feedback that were decided, and of those that were deleted with a user's data."""

    decided: set[str]
    deleted: set[str]

    def has_item(self, item: Feedback) -> bool:
        """Whether an item is over; what was said of a deleted interaction is."""
        about = {item.id, item.inference, str(item.body.get("rejected", ""))}
        return item.id in self.decided or not self.deleted.isdisjoint(about)

    def has_record(self, record: Interaction) -> bool:
        """Whether an interaction is over."""
        return canonical(record.id) in self.decided | self.deleted


async def known_of(bus: Bus, job: str) -> Known:
    """What the ledger admitted, what DECISIONS tells of the rest, and what deletions named. Raises Unavailable."""
    decided, deleted, newest, leaders = set[str](), set[str](), dict[str, str](), Leaders()
    async for message in bus.scan(subjects.LEDGER, subjects.ledger(job)):
        for event in decode_events(message.data):
            for admission in event.admissions if isinstance(event, Admitted) else ():
                decided.update(map(canonical, (*admission.interactions, *admission.feedback)))
    async for message in bus.scan(subjects.DECISIONS, subjects.decisions(job)):
        batch, envelope = unpack(await data_of(bus, subjects.DECISIONS, message), FateBatch)
        if leaders.is_gone(job, envelope.epoch):
            continue
        newest |= {fate.feedback: fate.status for fate in batch.items}
        decided |= {canonical(one.interaction) for one in batch.interactions if one.reason != CUT}
    async for message in bus.scan(subjects.FEEDBACK, subjects.erasures(job)):
        erasure = unpack(message.data, Erasure)[0]
        deleted.update(map(canonical, (*erasure.interactions, *erasure.feedback)))
    return Known(decided | {name for name, status in newest.items() if status not in UNDECIDED}, deleted)
