"""What was made of a user's interactions and feedback: groups to train on, and the versions that were trained on them.

The ledger tells, which is never purged.
"""

from __future__ import annotations

from collections.abc import Collection, Container

from penstock.services.coordinator.buried import buried
from penstock.services.coordinator.feedback.pieces import erase_letter, erase_message
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, BatchTrained, Event
from penstock.shared.protocol.interaction import bare_id
from penstock.shared.protocol.trajectory import parse_group_header
from penstock.shared.transport.bus import Bus, Message

__all__ = ["Made", "erase_groups", "is_made_of"]


class Made:
    """What one job made of a user's data, by its ledger.

    Args:
        user: pseudonym; what was admitted of their conversations is theirs, whatever else is known of it.
        interactions, feedback: ids of what is theirs.
        others: feedback of others of which it is asked whether it was admitted.

    Attributes:
        ordinals: draws whose groups hold what is theirs.
        versions: policy versions that were trained on it, rolled back or not.
        decided: those of ``others`` that were admitted.
        low_feedback: sequence in FEEDBACK below which everything is decided.
    """

    def __init__(
        self, user: str, interactions: Container[str], feedback: Container[str], others: Collection[str]
    ) -> None:
        self._user, self._interactions, self._feedback, self._others = user, interactions, feedback, others
        self.ordinals, self.versions, self.decided = set[int](), set[int](), set[str]()
        self.low_feedback = 0
        self._about: set[int] = set()
        """Draws that hold it, or whose reward comes from it."""
        self._sealed: dict[int, set[int]] = {}

    def take(self, event: Event) -> None:
        """The next event of the ledger."""
        match event:
            case Admitted():
                self.low_feedback = event.low_feedback
                for admission in event.admissions:
                    self._admitted(admission)
            case BatchSealed():
                self._sealed[event.number] = {group.draw.ordinal for group in event.groups}
            case BatchTrained():
                if not self._about.isdisjoint(self._sealed.pop(event.number, ())):
                    self.versions.add(event.version)
            case _:
                pass

    def _admitted(self, admission: Admission) -> None:
        self.decided.update(name for name in admission.feedback if name in self._others)
        if self._user in (admission.user, *admission.users) or is_made_of(
            admission, self._interactions, self._feedback
        ):
            self.ordinals.add(admission.ordinal)
            self._about.add(admission.ordinal)
        elif any(name in self._feedback for name in admission.feedback):
            self._about.add(admission.ordinal)


def is_made_of(admission: Admission, interactions: Container[str], feedback: Container[str]) -> bool:
    """Whether the group of an admission holds any of these (canonical ids)."""
    names = (*admission.interactions, *admission.context)
    if any((bare_id(name) or name) in interactions for name in names):
        return True
    return not admission.interactions and any(name in feedback for name in admission.feedback)


async def erase_groups(bus: Bus, job: str, ordinals: Container[int]) -> int:
    """Delete the groups of these draws, dead letters among them; how many. One that waits for training is lost.

    Raises:
        Unavailable: the bus went away; safe to repeat.
    """
    erased = 0
    async for message in bus.scan(subjects.EXPERIENCE, subjects.experience(job), headers_only=True):
        if _ordinal(message) in ordinals:
            await erase_message(bus, subjects.EXPERIENCE, message)
            erased += 1
    for letter in await buried(bus, job):
        if letter.stream == subjects.EXPERIENCE and _ordinal(letter.first) in ordinals:
            await erase_letter(bus, letter)
            erased += 1
    return erased


def _ordinal(group: Message) -> int:
    """The place in the job's data order that a group is of; -1 where its headers do not say."""
    try:
        return parse_group_header(group.headers).draw.ordinal
    except ProtocolError:
        return -1
