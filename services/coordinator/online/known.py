"""What is known of a job's live material, wherever it stands: read from end to end, where memory does not reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from penstock.services.coordinator.feedback.erasure import UNDECIDED, target_of
from penstock.services.coordinator.feedback.leaders import Leaders
from penstock.services.coordinator.feedback.pieces import data_of
from penstock.services.coordinator.online.episode import CUT
from penstock.services.coordinator.online.names import canonical
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import Admitted, decode_events
from penstock.shared.protocol.interaction import Erasure, FateBatch, Feedback, Interaction
from penstock.shared.runtime.ledger import LedgerArchive, scan_ledger
from penstock.shared.transport.bus import Bus

__all__ = ["Known", "known_of", "names_in"]


class Known(NamedTuple):
    """Ids of interactions and feedback that were decided, and of those that were deleted with a user's data."""

    decided: set[str]
    deleted: set[str]

    def has_item(self, item: Feedback) -> bool:
        """Whether an item is over; what was said of a deleted interaction is.

        A retraction that came first is told that it was taken, and is not over before what it takes back is.
        """
        about = {item.id, item.inference, str(item.body.get("rejected", ""))}
        return {item.id, target_of(item)} <= self.decided or not self.deleted.isdisjoint(about)

    def has_record(self, record: Interaction) -> bool:
        """Whether an interaction is over."""
        return canonical(record.id) in self.decided | self.deleted


def names_in(items: Iterable[Feedback]) -> set[str]:
    """What must be known of to say which of these are over."""
    return {
        name
        for item in items
        for name in (item.id, target_of(item), item.inference, str(item.body.get("rejected", "")))
    }


async def known_of(bus: Bus, job: str, names: set[str], archive: LedgerArchive | None = None) -> Known:
    """What the ledger admitted of ``names``, what DECISIONS tells of the rest, and what deletions named.

    Raises:
        ProtocolError: the ledger or a deletion cannot be read.
        Unavailable: the bus went away.
    """
    decided, deleted, newest, leaders = set[str](), set[str](), dict[str, str](), Leaders()
    async for entry in scan_ledger(bus, job, archive):
        for event in decode_events(entry.data):
            for admission in event.admissions if isinstance(event, Admitted) else ():
                decided.update(names.intersection(map(canonical, (*admission.interactions, *admission.feedback))))
    async for message in bus.scan(subjects.DECISIONS, subjects.decisions(job)):
        with contextlib.suppress(ProtocolError):  # of another version, as whoever leads passes over it
            batch, envelope = unpack(await data_of(bus, subjects.DECISIONS, message), FateBatch)
            if leaders.is_gone(job, envelope.epoch):
                continue
            newest |= {fate.feedback: fate.status for fate in batch.items if fate.feedback in names}
            decided |= names & {canonical(one.interaction) for one in batch.interactions if one.reason != CUT}
    async for message in bus.scan(subjects.FEEDBACK, subjects.erasures(job)):
        erasure = unpack(message.data, Erasure)[0]
        deleted |= names.intersection(map(canonical, (*erasure.interactions, *erasure.feedback)))
    return Known(decided | {name for name, status in newest.items() if status not in UNDECIDED}, deleted)
