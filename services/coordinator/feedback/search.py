"""Finds a user's data in the streams: interactions, feedback, and copies of both among the dead letters.

Streams are searched completely, because an incomplete index would miss data that must be deleted. A message that does
not decode belongs to the user if its bytes contain the user's pseudonym or an id of the user's data; messages store
both as text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import msgspec

from penstock.services.coordinator.feedback.pieces import data_of
from penstock.services.coordinator.leader.dead_letters import DeadLetter, payload_of, read_dead_letters
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import (
    EPISODE_HEADER,
    Erasure,
    Feedback,
    FeedbackBatch,
    Interaction,
    bare_id,
    named_users,
)
from penstock.shared.protocol.parts import PART
from penstock.shared.transport.bus import Bus, Message

__all__ = ["Found", "Place", "Search", "decoded"]

T = TypeVar("T", bound=msgspec.Struct)
Place = Message | DeadLetter
"""Place where a user's data is stored: a first message in INTERACTIONS or FEEDBACK (without payload), or a dead
letter."""
ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(slots=True)
class Found:
    """Data of a user in one job."""

    interactions: defaultdict[str, list[Message]] = field(default_factory=lambda: defaultdict(list))
    """Messages by interaction id. A response that was interrupted and completed has two messages; one that is stored
    only as a dead letter has none."""
    episodes: set[str] = field(default_factory=set)
    feedback: set[str] = field(default_factory=set)
    mixed: list[tuple[Place, list[Feedback]]] = field(default_factory=list)
    """Messages and dead letters with feedback of the user, and the items of other users in them."""
    dead_letters: list[DeadLetter] = field(default_factory=list)
    """Dead letters with data of this user only."""
    gone: set[str] = field(default_factory=set)
    """Ids of interactions and feedback that earlier deletions of the user named."""

    def covers(self, item: Feedback) -> bool:
        """Return True if ``item`` refers to an interaction or episode of the user."""
        targets = (item.inference, item.body.get("rejected"))
        return item.episode in self.episodes or any(id in self.interactions or id in self.gone for id in targets)


class _Unreadable(NamedTuple):
    """A message that does not decode, and the ids that its bytes contain."""

    job: str
    stream: str
    place: Place
    ids: frozenset[str]


class Search:
    """Search for all data of one user, whose pseudonym is ``user``. An instance searches only once."""

    def __init__(self, bus: Bus, user: str, pseudonym: Callable[[str], str]) -> None:
        self._bus, self._user, self._pseudonym = bus, user, pseudonym
        self._found: defaultdict[str, Found] = defaultdict(Found)
        self._unreadable: list[_Unreadable] = []

    async def run(self) -> dict[str, Found]:
        """Search all streams and return the user's data, by job. Raises Unavailable."""
        await self._recall()
        dead_letters = await read_dead_letters(self._bus, "*")
        async for message in self._bus.scan(subjects.INTERACTIONS, f"{subjects.INTERACTIONS.lower()}.>"):
            if PART not in message.headers:
                data = await data_of(self._bus, subjects.INTERACTIONS, message)
                self._take_record(message.subject.split(".")[1], replace(message, data=b""), data)
        for dead_letter in dead_letters:
            if dead_letter.stream == subjects.INTERACTIONS:
                self._take_record(dead_letter.job, dead_letter, (await payload_of(self._bus, dead_letter))[0])
        async for message in self._bus.scan(subjects.FEEDBACK, subjects.feedback("*")):
            data = await data_of(self._bus, subjects.FEEDBACK, message)
            self._take_feedback(message.subject.rpartition(".")[2], replace(message, data=b""), data)
        for dead_letter in dead_letters:
            if dead_letter.stream == subjects.FEEDBACK:
                self._take_feedback(dead_letter.job, dead_letter, (await payload_of(self._bus, dead_letter))[0])
        self._judge_by_ids()
        return self._found

    async def _recall(self) -> None:
        """Load the ids of interactions and feedback that the user's earlier deletions named. With these ids, the search
        finds remaining copies of this data, and feedback that refers to it."""
        async for message in self._bus.scan(subjects.FEEDBACK, subjects.erasures("*")):
            erasure = decoded(message.data, Erasure)
            if erasure is not None and erasure.user == self._user:
                self._found[message.subject.split(".")[1]].gone.update(erasure.interactions, erasure.feedback)

    def _take_record(self, job: str, place: Place, data: bytes) -> None:
        record = decoded(data, Interaction)
        if record is None:
            self._judge(_Unreadable(job, subjects.INTERACTIONS, place, _ids_in(data)), data)
        elif self._names(record):
            self._keep(job, record.id, record.episode, place)

    def _take_feedback(self, job: str, place: Place, data: bytes) -> None:
        batch = decoded(data, FeedbackBatch)
        if batch is None:
            self._judge(_Unreadable(job, subjects.FEEDBACK, place, _ids_in(data)), data)
            return
        mine = self._found.get(job, Found())
        gone = {item.id for item in batch.items if self._names(item) or mine.covers(item)}
        if gone:
            self._found[job].feedback |= gone
            self._found[job].mixed.append((place, [item for item in batch.items if item.id not in gone]))

    def _names(self, said: Interaction | Feedback) -> bool:
        return self._user in named_users(said.user, said.tags, self._pseudonym)

    def _judge(self, one: _Unreadable, data: bytes) -> None:
        if self._user.encode() in data:
            self._take_unreadable(one)
        else:
            self._unreadable.append(one)

    def _judge_by_ids(self) -> None:
        """Assign unreadable messages to the user if they contain ids of the user's data; runs after all reads."""
        for one in self._unreadable:
            mine = self._found.get(one.job)
            if mine is None:
                continue
            ids = mine.interactions.keys() | mine.feedback | mine.gone
            if not one.ids.isdisjoint(ids if one.stream == subjects.INTERACTIONS else ids | mine.episodes):
                self._take_unreadable(one)

    def _take_unreadable(self, one: _Unreadable) -> None:
        if isinstance(one.place, DeadLetter):
            self._found[one.job].dead_letters.append(one.place)
        elif one.stream == subjects.INTERACTIONS:  # id in its subject, episode in a header
            headers = one.place.headers
            self._keep(one.job, one.place.subject.rpartition(".")[2], headers.get(EPISODE_HEADER, ""), one.place)
        else:
            self._found[one.job].mixed.insert(0, (one.place, []))  # while the rest exists, a search finds it again

    def _keep(self, job: str, id: str, episode: str, place: Place) -> None:
        mine = self._found[job]
        records = mine.interactions[bare_id(id) or id]
        mine.episodes |= {bare_id(episode) or episode} - {""}
        if isinstance(place, DeadLetter):
            mine.dead_letters.append(place)
        else:
            records.append(place)


def decoded(data: bytes, kind: type[T]) -> T | None:
    """Decode a message; return None if it does not decode."""
    try:
        return unpack(data, kind)[0]
    except ProtocolError:
        return None


def _ids_in(data: bytes) -> frozenset[str]:
    return frozenset(id.decode() for id in ID.findall(data))
