"""Dead letters of INTERACTIONS and FEEDBACK that can be read by now: stored anew, but for what is known of them.

A leader passes over what it cannot read, and its mark in the ledger moves on: later leaders begin behind it. What is
stored anew all of them read once more. So what is over, or waits here, is left out: nobody remembers what was decided
below the mark, and would take it for new.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.services.coordinator.online.episode import CUT
from penstock.services.coordinator.online.known import known_of, names_in
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.names import canonical
from penstock.services.coordinator.online.quarantine import Quarantine
from penstock.services.coordinator.supply import LiveLetter
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.interaction import Erasure, Feedback, FeedbackBatch, Interaction
from penstock.shared.runtime.ledger import LedgerArchive
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["put_back"]


async def put_back(
    bus: Bus, job: str, letter: LiveLetter, matching: Matching, quarantine: Quarantine, *, archive: LedgerArchive | None
) -> int:
    """Store a letter's message where it was; how many interactions, or items of feedback, that brings back.

    Args:
        archive: where older entries of the ledger are.
        matching, quarantine: what waits here; what does not any more is told in DECISIONS.

    Raises:
        ProtocolError: it does not decode here either.
        Unavailable: the bus went away; it may be stored or not. Safe to repeat.
    """
    data = letter.data
    if letter.stream == subjects.INTERACTIONS:
        record = unpack(data, Interaction)[0]
        subject = subjects.interaction(job, record.id)
        count = int(await _is_new(bus, job, letter.seq, record, matching, archive=archive))
    elif _is_erasure(data):
        subject, count = subjects.erasures(job), 1
    else:
        items = unpack(data, FeedbackBatch)[0].items
        known = await known_of(bus, job, names_in(items), archive)
        waiting = {one.id: one.revision for one in (*_waiting(matching), *quarantine)}
        new = [one for one in items if one.revision > waiting.get(one.id, -1) and not known.has_item(one)]
        subject, count = subjects.feedback(job), len(new)
        if count < len(items):
            data = pack(FeedbackBatch(items=new), job=job)
    if count:
        msg_id = f"again:{letter.stream}:{letter.seq}"
        await bus.publish_whole([Outgoing(subject, data, letter.headers, msg_id)], deadline_s=5)
    return count


async def _is_new(
    bus: Bus, job: str, seq: int, record: Interaction, matching: Matching, *, archive: LedgerArchive | None
) -> bool:
    """Whether nothing newer is recorded of an interaction, and nobody has decided on it or is about to."""
    newest = await bus.last(subjects.INTERACTIONS, subjects.interaction(job, record.id))
    if newest is not None and newest.seq > seq:
        return False
    turns = (turn.interaction for episode in matching.episodes.values() for turn in episode.turns)
    is_here = any(turn.id == record.id and turn.finish != CUT for turn in turns)
    return not is_here and not (await known_of(bus, job, {canonical(record.id)}, archive)).has_record(record)


def _is_erasure(data: bytes) -> bool:
    try:
        unpack(data, Erasure)
    except ProtocolError:
        return False
    return True


def _waiting(matching: Matching) -> Iterator[Feedback]:
    """Feedback that is undecided."""
    held = [matching.offers.items]
    for episode in matching.episodes.values():
        held += [episode.items, *(turn.items for turn in episode.turns)]
    yield from (item.feedback for items in held for item in items.values())
    yield from (item.feedback for item in matching.parked)
