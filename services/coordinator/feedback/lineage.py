"""Lineage of a user's interactions and feedback: the groups made of them, and the versions trained on those groups.

The source is the ledger, which keeps all its entries.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import NamedTuple

from penstock.services.coordinator.feedback.pieces import erase_dead_letter, erase_message
from penstock.services.coordinator.leader.dead_letters import read_dead_letters
from penstock.services.coordinator.training.decided import final_ids
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchRefused,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Decided,
    Dropped,
    Event,
    Finished,
    LineageForked,
    Promoted,
)
from penstock.shared.protocol.live.interaction import bare_id
from penstock.shared.protocol.trajectory import parse_group_header
from penstock.shared.transport.bus import Bus, Message

__all__ = ["UserDataLineage", "erase_groups", "is_made_of", "is_of_user"]


class UserDataLineage:
    """Lineage of a user's data in one job, from its ledger.

    Args:
        user: pseudonym; everything admitted from the user's conversations is the user's.
        until: time (Unix seconds) of the last admission that ``user`` selects; later conversations are not deleted.
        interactions, feedback: ids of the user's items, which select admissions of any time.
        others: feedback of other users, for which ``decided`` and ``needed`` are computed.

    Attributes:
        ordinals: draws whose groups contain the user's data.
        versions: policy versions that were trained on the data, rolled back or not.
        decided: ids in ``others`` that were admitted, or ended without training.
        low_feedback: stream sequence number in FEEDBACK below which everything is decided.
        seq: stream sequence number of the newest ledger entry that was read.
    """

    def __init__(
        self, user: str, interactions: Container[str], feedback: Container[str], others: Collection[str], until: float
    ) -> None:
        self._user, self._interactions, self._feedback, self._others = user, interactions, feedback, others
        self._until = until
        self.ordinals, self.versions, self.decided = set[int](), set[int](), set[str]()
        self.low_feedback = self.seq = 0
        self._about: set[int] = set()
        """Draws whose groups contain the user's data, or whose rewards come from the user's feedback."""
        self._bodies: dict[int, list[str]] = {}
        """For each draw whose group consists of items in ``others``: the ids of these items."""
        self._open: set[int] = set()
        """Draws made of the user's data or of ``others`` that are in flight or in a sealed batch."""
        self._sealed: dict[int, _Batch] = {}
        self._trained: dict[int, _Batch] = {}
        """Trained batches that a rollback can reopen or a trainer can repeat, because EXPERIENCE still has their
        groups."""
        self._checkpoints: list[int] = []
        self._served = -1
        """Number of the batch that made the served version, in a job with a promotion gate; -1 if there is none."""

    @property
    def held(self) -> set[int]:
        """Draws in ``ordinals`` whose groups a trainer may still request."""
        return self.ordinals & self._requestable()

    @property
    def needed(self) -> frozenset[str]:
        """Ids of other users' feedback (in ``others``) that must still be kept: a trainer may yet request the group
        that was built from it."""
        return frozenset(name for ordinal in self._requestable() for name in self._bodies.get(ordinal, ()))

    def _requestable(self) -> set[int]:
        """Return the draws in flight, in a sealed batch, or in a batch that a restarted trainer repeats."""
        newest = self._earliest_start()
        return self._open.union(*(batch.ordinals for number, batch in self._trained.items() if number > newest))

    def _earliest_start(self) -> int:
        """Return the number of the oldest checkpoint from which a trainer may restart, or -1 if there is none.

        See ``restart.earliest_start``.
        """
        newest = max(self._checkpoints, default=-1)
        before = [number for number in self._checkpoints if number <= self._served]
        return newest if self._served < 0 else min(newest, max(before, default=newest))

    def take(self, event: Event) -> None:
        """Apply the next event of the ledger."""
        match event:
            case Admitted() | Decided():
                self._take_decisions(event)
            case BatchSealed():
                known = self.ordinals | self._about | self._bodies.keys()
                found = frozenset(group.draw.ordinal for group in event.groups) & known
                self._sealed[event.number] = _Batch(found, max((group.seq for group in event.groups), default=0))
            case BatchTrained():
                self._take_trained(event)
            case Dropped(draws=draws) | BatchRefused(bad=draws) if not event.redraw:
                self._open.difference_update(draw.ordinal for draw in draws)
            case LineageForked():
                self._roll_back(event)
            case Checkpointed():
                self._checkpoints.append(event.number)
                self._trained = {n: batch for n, batch in self._trained.items() if batch.last_seq >= event.low_seq}
            case Promoted():
                self._served = event.number
            case Finished():
                self._open.clear()
                self._trained.clear()
            case _:
                pass

    def _take_decisions(self, event: Admitted | Decided) -> None:
        if isinstance(event, Decided):
            self.decided.update(name for name in final_ids(event.feedback) if name in self._others)
            return
        self.low_feedback = event.low_feedback
        for admission in event.admissions:
            self._admitted(admission)

    def _take_trained(self, event: BatchTrained) -> None:
        batch = self._sealed.pop(event.number, None)
        if batch is None or not batch.ordinals:
            return
        self._trained[event.number] = batch
        self._open -= batch.ordinals
        if not self._about.isdisjoint(batch.ordinals):
            self.versions.add(event.version)

    def _roll_back(self, event: LineageForked) -> None:
        """Apply a rollback: discard the batches and checkpoints from batch ``event.from_batch`` on, and all sealed
        batches. If ``event.redraw`` is True, the draws of these batches are in flight again."""
        rolled_back = [number for number in self._trained if number >= event.from_batch]
        found = [self._trained.pop(number) for number in rolled_back] + list(self._sealed.values())
        self._sealed.clear()
        self._checkpoints = [number for number in self._checkpoints if number < event.from_batch]
        for batch in found:
            if event.redraw:  # the draws are in flight again
                self._open |= batch.ordinals
            else:
                self._open -= batch.ordinals

    def _admitted(self, admission: Admission) -> None:
        self.decided.update(name for name in admission.feedback if name in self._others)
        if is_of_user(admission, self._user, self._until) or is_made_of(admission, self._interactions, self._feedback):
            self.ordinals.add(admission.ordinal)
            self._about.add(admission.ordinal)
            self._open.add(admission.ordinal)
            return
        if not admission.interactions and (names := [name for name in admission.feedback if name in self._others]):
            self._bodies[admission.ordinal] = names
            self._open.add(admission.ordinal)
        if any(name in self._feedback for name in admission.feedback):
            self._about.add(admission.ordinal)


class _Batch(NamedTuple):
    """A batch: the draws in it that a deletion concerns, and the highest stream sequence number of its groups in
    EXPERIENCE."""

    ordinals: frozenset[int]
    last_seq: int


def is_made_of(admission: Admission, interactions: Container[str], feedback: Container[str]) -> bool:
    """Return True if the group of an admission contains any of ``interactions`` or ``feedback`` (canonical ids). An
    admission is the ledger's record that live interactions or feedback became one group for training."""
    names = (*admission.interactions, *admission.context)
    if any((bare_id(name) or name) in interactions for name in names):
        return True
    return not admission.interactions and any(name in feedback for name in admission.feedback)


def is_of_user(admission: Admission, user: str, until: float) -> bool:
    """Return True if an admission dates from ``until`` (Unix seconds) or earlier, and its group contains a conversation
    of ``user`` (a pseudonym)."""
    return admission.time <= until and user in (admission.user, *admission.users)


async def erase_groups(bus: Bus, job: str, ordinals: Container[int]) -> int:
    """Delete the groups of the draws ``ordinals`` from EXPERIENCE and from the dead letters; return the number of
    groups.

    Groups that wait for training are deleted, too.

    Raises:
        Unavailable: the bus went away; safe to repeat.
    """
    erased = 0
    async for message in bus.scan(subjects.EXPERIENCE, subjects.experience(job), headers_only=True):
        if _ordinal(message) in ordinals:
            await erase_message(bus, subjects.EXPERIENCE, message)
            erased += 1
    for dead_letter in await read_dead_letters(bus, job):
        if dead_letter.stream == subjects.EXPERIENCE and _ordinal(dead_letter.first) in ordinals:
            await erase_dead_letter(bus, dead_letter)
            erased += 1
    return erased


def _ordinal(group: Message) -> int:
    """Return the ordinal of a group's draw; -1 if its headers are invalid."""
    try:
        return parse_group_header(group.headers).draw.ordinal
    except ProtocolError:
        return -1
