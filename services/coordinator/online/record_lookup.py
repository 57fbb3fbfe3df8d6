"""Finds records in the streams: interactions by stream sequence number or name, and copies of feedback that was stored
again.

A user's deletion reads a message, removes that user's items, and stores the rest again, while the leader continues to
decide. A leader also skips a message that it cannot read; once the message is readable, it is stored again. In both
cases a leader reads items a second time that may be decided already, below its low-water mark. This module finds their
decisions in the ledger and among deletions, so that an item is admitted once, whichever copy a leader reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from penstock.services.coordinator.feedback.erasure import target_of
from penstock.services.coordinator.online.examples import InteractionRecord
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.quarantine import Quarantine
from penstock.services.coordinator.online.statuses import DecidedNames
from penstock.services.coordinator.online.turns import DISCONNECTED, canonical_id
from penstock.services.coordinator.payload import whole_of
from penstock.services.coordinator.training.decided import final_ids
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.supply import LiveDeadLetter
from penstock.shared.errors import NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Admitted, Decided, decode_events
from penstock.shared.protocol.live.interaction import (
    RESTORED_HEADER,
    Erasure,
    Feedback,
    FeedbackBatch,
    Interaction,
)
from penstock.shared.runtime.ledger import LedgerArchive, scan_ledger
from penstock.shared.transport.bus import Bus, Message, Outgoing

__all__ = [
    "DecidedIds",
    "InteractionReader",
    "RestoredCopies",
    "decided_ids",
    "find_restored_copies",
    "ids_in",
    "requeue_dead_letter",
]

LOOKUP = "a look at interactions"
AT_ONCE = 64
"""Maximum number of concurrent look-ups of interactions: clients choose the names in feedback, and each costs a
request."""
T = TypeVar("T", bound=msgspec.Struct)


class InteractionReader:
    """Reads, from the stream INTERACTIONS, interactions that the leader no longer has in memory.

    Args:
        retry: returns the leader's ``Retry``, which repeats requests and reports the wait while the bus is unavailable.
    """

    def __init__(self, bus: Bus, job: str, retry: Callable[[], Retry]) -> None:
        self._bus, self._job, self._retry = bus, job, retry
        self._missing = DecidedNames()
        """Names of interactions without a usable record; further feedback that refers to these names costs no
        request."""

    async def by_seq(self, seqs: Iterable[int]) -> dict[int, Interaction]:
        """Return the interactions that INTERACTIONS still has at the stream sequence numbers ``seqs``, keyed by
        number."""
        get = partial(self._bus.get_whole, subjects.INTERACTIONS, sorted(seqs))
        found = await self._retry().until_taken(LOOKUP, subjects.interactions(self._job), get)
        return {seq: unpack(message.data, Interaction)[0] for seq, message in found.items()}

    async def by_name(self, names: Iterable[str]) -> dict[str, InteractionRecord]:
        """Return the facts of the interactions with these canonical names, without missing ones; look up each missing
        name only once."""
        to_find = [name for name in dict.fromkeys(names) if name not in self._missing]
        found = dict[str, InteractionRecord | None]()
        if to_find:
            find_one = partial(self._find_all, to_find, found)
            await self._retry().until_taken(LOOKUP, subjects.interactions(self._job), find_one)
        self._missing.add_all({name: "" for name, record in found.items() if record is None})
        return {name: record for name, record in found.items() if record is not None}

    def on_interaction(self, name: str) -> None:
        """Note that the interaction with the canonical name ``name`` exists, because the leader has read it."""
        self._missing.discard(name)

    async def _find_all(self, names: Iterable[str], found: dict[str, InteractionRecord | None]) -> None:
        """Look up the ``names`` that ``found`` lacks, and add their records. After Unavailable, ``found`` is
        incomplete."""
        window = asyncio.Semaphore(AT_ONCE)

        async def find_one(name: str) -> None:
            async with window:
                found[name] = await self._find(name)

        try:
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    if name not in found:
                        tasks.create_task(find_one(name))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _find(self, name: str) -> InteractionRecord | None:
        message = await self._bus.last(subjects.INTERACTIONS, subjects.interaction(self._job, name))
        if message is None:
            return None
        with contextlib.suppress(ProtocolError, NotFound):  # an unreadable record is useless
            return InteractionRecord.of(
                message.seq, await whole_of(self._bus, subjects.INTERACTIONS, message, Interaction)
            )
        return None


class DecidedIds(NamedTuple):
    """Ids of interactions and feedback that were decided, and of those that were deleted with a user's data."""

    decided: set[str]
    deleted: set[str]

    def has_item(self, item: Feedback) -> bool:
        """Return True if an item is decided, or refers to a deleted interaction.

        A retraction that arrived before its item has a status at once, but is decided only with its item.
        """
        about = {item.id, item.inference, str(item.body.get("rejected", ""))}
        return {item.id, target_of(item)} <= self.decided or not self.deleted.isdisjoint(about)

    def has_record(self, record: Interaction) -> bool:
        """Return True if an interaction is decided or deleted."""
        return canonical_id(record.id) in self.decided | self.deleted


def ids_in(items: Iterable[Feedback]) -> set[str]:
    """Return the ids to look up in order to know which of ``items`` are decided: the ids of the items and of their
    targets."""
    return {
        name
        for item in items
        for name in (item.id, target_of(item), item.inference, str(item.body.get("rejected", "")))
    }


async def decided_ids(bus: Bus, job: str, names: set[str], archive: LedgerArchive | None = None) -> DecidedIds:
    """Find which of ``names`` are decided (admitted or closed in the ledger) or deleted (together with a user's data).

    Raises:
        ProtocolError: the ledger or a deletion cannot be read.
        Unavailable: the bus is unavailable.
    """
    decided, deleted = set[str](), set[str]()
    async for entry in scan_ledger(bus, job, archive):
        for event in decode_events(entry.data):
            match event:
                case Admitted():
                    for one in event.admissions:
                        refused = (name for name, reason in one.refused.items() if reason != DISCONNECTED)
                        decided.update(names.intersection(map(canonical_id, (*one.interactions, *one.feedback))))
                        decided.update(names.intersection(refused))
                case Decided():
                    retracted = (
                        name for one in event.feedback if one.status == "retracted" for name in one.ids.unpack()
                    )
                    refused = (
                        name for one in event.interactions if one.reason != DISCONNECTED for name in one.ids.unpack()
                    )
                    decided.update(names.intersection((*final_ids(event.feedback), *retracted, *refused)))
                case _:
                    pass
    async for message in bus.scan(subjects.FEEDBACK, subjects.erasures(job)):
        erasure = unpack(message.data, Erasure)[0]
        deleted |= names.intersection(map(canonical_id, (*erasure.interactions, *erasure.feedback)))
    return DecidedIds(decided, deleted)


class RestoredCopies:
    """Filter for messages that were stored again when a user's data was deleted. It removes the items in them that are
    already decided.

    A deletion replaces messages that have items of the user by copies without these items. The other items in a copy
    may have been decided before. Items that the leader has read itself stay: it knows if they are decided.
    """

    def __init__(self, bus: Bus, job: str, archive: LedgerArchive | None = None) -> None:
        self._bus, self._job, self._archive = bus, job, archive
        self._known, self._until = DecidedIds(set(), set()), 0
        """Decided and deleted ids in all copies up to the stream sequence number ``_until``."""

    async def undecided(
        self, message: Message, items: Sequence[Feedback], is_here: Callable[[str], bool]
    ) -> Sequence[Feedback]:
        """Return the items of a message that may be undecided. Raises Unavailable, ProtocolError.

        Args:
            is_here: returns True for an item that this leader has read before.
        """
        if RESTORED_HEADER not in message.headers or all(is_here(item.id) for item in items):
            return items
        if message.seq > self._until:
            await self._check(message)
        return [item for item in items if is_here(item.id) or not self._known.has_item(item)]

    async def _check(self, message: Message) -> None:
        """Find the decided items in ``message`` and in all later copies in a single pass over the ledger, because a
        deletion stores many copies."""
        places = await _copy_seqs(self._bus, self._job, message.seq)
        copies = await self._bus.get_whole(subjects.FEEDBACK, places)
        names = ids_in(item for items in map(_items_of, copies.values()) for item in items)
        self._known, self._until = (
            await decided_ids(self._bus, self._job, names, self._archive),
            max([message.seq, *places]),
        )


async def find_restored_copies(bus: Bus, job: str, name: str, seq: int) -> list[Feedback]:
    """Return the copies of the item ``name`` that were stored when a user's data was deleted from the item's message,
    whose stream sequence number was ``seq``."""
    places = await _copy_seqs(bus, job, seq + 1, was=seq)
    copies = await bus.get_whole(subjects.FEEDBACK, places)
    return [item for message in copies.values() for item in _items_of(message) if item.id == name]


async def _copy_seqs(bus: Bus, job: str, start_seq: int, *, was: int | None = None) -> list[int]:
    """Return the stream sequence numbers (at least ``start_seq``) of the messages in FEEDBACK that were stored again
    when a user's data was deleted.

    ``was``: return only copies of the message that had this stream sequence number; None: return all copies.
    """
    found = await bus.read(subjects.FEEDBACK, subjects.feedback(job), start_seq=start_seq, headers_only=True)
    before = ((message.seq, message.headers.get(RESTORED_HEADER, "").split()) for message in found)
    return [seq for seq, places in before if places and (was is None or str(was) in places)]


def _items_of(message: Message) -> Sequence[Feedback]:
    try:
        return unpack(message.data, FeedbackBatch)[0].items
    except ProtocolError:
        return ()


async def requeue_dead_letter(
    bus: Bus,
    job: str,
    dead_letter: LiveDeadLetter,
    matching: Matching,
    quarantine: Quarantine,
    *,
    archive: LedgerArchive | None,
) -> int:
    """Store a dead letter's message in its stream again; return the number of interactions or items restored.

    Args:
        archive: has the older entries of the ledger.
        matching, quarantine: have the leader's undecided data. Neither this nor decided or deleted data is restored.

    Raises:
        ProtocolError: this version of the coordinator cannot decode the message either.
        Unavailable: the bus is unavailable; the message may be stored or not. Safe to repeat.
    """
    data = dead_letter.data
    if dead_letter.stream == subjects.INTERACTIONS:
        record = unpack(data, Interaction)[0]
        subject = subjects.interaction(job, record.id)
        count = int(await _is_new(bus, job, dead_letter.seq, record, matching, archive=archive))
    elif _is_erasure(data):
        subject, count = subjects.erasures(job), 1
    else:
        items = unpack(data, FeedbackBatch)[0].items
        known = await decided_ids(bus, job, ids_in(items), archive)
        waiting = {one.id: one.revision for one in (*_undecided_feedback(matching), *quarantine)}
        new = [one for one in items if one.revision > waiting.get(one.id, -1) and not known.has_item(one)]
        subject, count = subjects.feedback(job), len(new)
        if count < len(items):
            data = pack(FeedbackBatch(items=new), job=job)
    if count:
        msg_id = f"again:{dead_letter.stream}:{dead_letter.seq}"
        await bus.publish_whole([Outgoing(subject, data, dead_letter.headers, msg_id)], deadline_s=5)
    return count


async def _is_new(
    bus: Bus, job: str, seq: int, record: Interaction, matching: Matching, *, archive: LedgerArchive | None
) -> bool:
    """Return True if an interaction has no newer record, is not held by ``matching``, and is neither decided nor
    deleted."""
    newest = await bus.last(subjects.INTERACTIONS, subjects.interaction(job, record.id))
    if newest is not None and newest.seq > seq:
        return False
    turns = (turn.interaction for episode in matching.episodes.values() for turn in episode.turns)
    is_here = any(turn.id == record.id and turn.finish != DISCONNECTED for turn in turns)
    return not is_here and not (await decided_ids(bus, job, {canonical_id(record.id)}, archive)).has_record(record)


def _is_erasure(data: bytes) -> bool:
    try:
        unpack(data, Erasure)
    except ProtocolError:
        return False
    return True


def _undecided_feedback(matching: Matching) -> Iterator[Feedback]:
    """Yield all undecided feedback that ``matching`` holds."""
    held = [matching.examples.items]
    for episode in matching.episodes.values():
        held += [episode.items, *(turn.items for turn in episode.turns)]
    yield from (item.feedback for items in held for item in items.values())
    yield from (item.feedback for item in matching.unmatched)
