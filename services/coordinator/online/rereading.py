"""Reads what admissions rest on out of the streams, so that an audit decides on them again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

from penstock.services.coordinator.online.again import Stored, decided_again
from penstock.services.coordinator.online.names import canonical
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import Admission, Admitted, Event
from penstock.shared.protocol.interaction import EPISODE_HEADER, Feedback, FeedbackBatch, Interaction
from penstock.shared.transport.bus import Bus

__all__ = ["decide_again"]

NEWEST = 10_000
"""Admissions that are decided again; more would take longer than people wait for an audit."""
AT_ONCE = 256
"""Admissions whose records are held at once, and those of one decision more."""


async def decide_again(
    bus: Bus, job: str, config: OnlineJob, entries: Sequence[Sequence[Event]]
) -> tuple[int, list[str]]:
    """``(admissions decided again, what came out otherwise)``, the newest ones. Raises Unavailable."""
    decisions = [event.admissions for entry in entries for event in entry if isinstance(event, Admitted)]
    turns = await _episodes(bus, job)
    checked, flaws = 0, list[str]()
    for some in _chunks(decisions):
        stored = await _read(bus, [admission for admissions in some for admission in admissions], turns)
        for admissions in some:
            count, found = await asyncio.to_thread(decided_again, admissions, stored, config)
            checked += count
            flaws += found
    return checked, flaws


def _chunks(decisions: Sequence[Sequence[Admission]]) -> Iterator[list[Sequence[Admission]]]:
    """The newest decisions, some at a time."""
    some: list[Sequence[Admission]] = []
    left = NEWEST
    for admissions in reversed(decisions):
        if left <= 0:
            break
        some.append(admissions)
        left -= len(admissions)
        if sum(map(len, some)) >= AT_ONCE:
            yield some
            some = []
    if some:
        yield some


async def _episodes(bus: Bus, job: str) -> dict[str, list[int]]:
    """Sequences of the records of each episode whose name is a UUID."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for message in await bus.read(subjects.INTERACTIONS, subjects.interactions(job), headers_only=True):
        found[canonical(message.headers.get(EPISODE_HEADER, ""))].append(message.seq)
    return found


async def _read(bus: Bus, admissions: Sequence[Admission], turns: dict[str, list[int]]) -> Stored:
    own = {seq for admission in admissions for seq in admission.interactions.values()}
    records = await _records(bus, own)
    episodes = {canonical(record.episode) for record in records.values() if not record.alone}
    others = {seq for episode in episodes for seq in turns.get(episode, ())} - own
    records |= await _records(bus, others)
    said = {seq for admission in admissions for seq in admission.feedback.values()}
    items: dict[int, Sequence[Feedback]] = {}
    for seq, message in (await bus.get_whole(subjects.FEEDBACK, sorted(said))).items():
        with contextlib.suppress(ProtocolError):  # overwritten, because a user wanted to be forgotten
            items[seq] = unpack(message.data, FeedbackBatch)[0].items
    oldest = min((seq for seqs in turns.values() for seq in seqs), default=1)
    return Stored(records, items, turns, oldest)


async def _records(bus: Bus, seqs: set[int]) -> dict[int, Interaction]:
    found: dict[int, Interaction] = {}
    for seq, message in (await bus.get_whole(subjects.INTERACTIONS, sorted(seqs))).items():
        with contextlib.suppress(ProtocolError):  # overwritten, because its user wanted to be forgotten
            found[seq] = unpack(message.data, Interaction)[0]
    return found
