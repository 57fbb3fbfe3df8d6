"""Deleting a user's data: what was recorded of them, what was said about that, what was made of it to train on, and the
episodes that were opened for them.

First the deletion is written down, then the ids (a tombstone that every replica reads, and that refuses them for good),
then the messages are overwritten in the streams; a deletion that was interrupted is gone through again. Streams are
searched from end to end: an index that forgot something would break the promise.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import TypeVar

import msgspec

from penstock.services.coordinator.feedback.made import Made, erase_groups, erase_message
from penstock.shared.errors import Conflict, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.episode import KEEP_S, EpisodeRecord
from penstock.shared.protocol.events import decode_events
from penstock.shared.protocol.interaction import (
    Erasure,
    FateBatch,
    Feedback,
    FeedbackBatch,
    Interaction,
    bare_id,
    named_users,
)
from penstock.shared.protocol.parts import PART, count_of
from penstock.shared.transport.bus import Bus, Message, Outgoing
from penstock.shared.transport.kv import Entry

__all__ = ["Eraser", "Report"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

PREFIX = "erasure"
NAMED = 10_000
"""Ids of each kind in one message."""
UNDECIDED = frozenset({"received", "matched", "quarantined"})
"""Fates that others follow. What has its last one is not stored anew: a later leader would decide it again."""


class Report(msgspec.Struct, kw_only=True):
    """A deletion, in the `privacy` bucket under the user's pseudonym. Counts grow until ``status`` is `done`."""

    user: str
    status: str
    requested: float
    finished: float | None = None
    interactions: int = 0
    feedback: int = 0
    groups: int = 0
    episodes: int = 0
    trained_versions: dict[str, list[int]] = {}


@dataclass(slots=True)
class _Found:
    """What belongs to a user in one job."""

    interactions: defaultdict[str, list[Message]] = field(default_factory=lambda: defaultdict(list))
    """Records by id: an answer that was broken off and completed has two."""
    episodes: set[str] = field(default_factory=set)
    feedback: set[str] = field(default_factory=set)
    mixed: list[tuple[Message, list[Feedback]]] = field(default_factory=list)
    """Messages that hold some of it, and what they hold of others."""
    gone: set[str] = field(default_factory=set)
    """What earlier deletions of the user named, interactions and feedback."""

    def covers(self, item: Feedback) -> bool:
        """Whether an item is about one of these interactions or episodes."""
        targets = (item.inference, item.body.get("rejected"))
        return item.episode in self.episodes or any(id in self.interactions or id in self.gone for id in targets)


class Eraser:
    """Deletes what the streams hold of a user."""

    def __init__(self, bus: Bus, pseudonym: Callable[[str], str]) -> None:
        self._bus, self._pseudonym = bus, pseudonym
        self._kv, self._opened = bus.kv(subjects.PRIVACY), bus.kv(subjects.EPISODES)

    async def begin(self, user: str) -> Report:
        """Write down that a user (a pseudonym) wants to be forgotten. Raises Unavailable."""
        report = Report(user=user, status="running", requested=time.time())
        await self._save(report)
        return report

    async def find(self, user: str) -> Report | None:
        """How far the deletion of a user is."""
        entry = await self._kv.get(f"{PREFIX}.{user}")
        return msgspec.json.decode(entry.value, type=Report) if entry is not None and entry.value else None

    async def unfinished(self) -> list[Report]:
        """Deletions that were begun, here or by a process that is gone."""
        entries = await self._kv.entries(PREFIX)
        reports = [msgspec.json.decode(entry.value, type=Report) for entry in entries if entry.value]
        return [report for report in reports if report.status != "done"]

    async def run(self, report: Report) -> int:
        """Delete; the sequence in FEEDBACK that an index must reach to have forgotten it, too. Safe to repeat.

        Raises:
            Unavailable: the bus went away; what is left is deleted by the next run.
        """
        found = await self._search(report.user)
        report.episodes += await self._end_episodes(report.user, found)
        last = max([0, *[await self._announce(report.user, job, mine) for job, mine in found.items()]])
        # What a leader admits after this search it drops itself: it reads what was announced.
        for job, made in (await self._made(report.user, found)).items():
            mine = found.get(job, _Found())
            versions, decided = await self._told(job, mine)
            report.groups += await erase_groups(self._bus, job, made.ordinals) if made.ordinals else 0
            for message, rest in mine.mixed:
                waits = [item for item in rest if _target(item) not in decided | made.decided]
                await self._rewrite(job, message, waits if message.seq >= made.low_feedback else [])
            for message in chain.from_iterable(mine.interactions.values()):
                await erase_message(self._bus, subjects.INTERACTIONS, message)
            report.interactions += len(mine.interactions)
            report.feedback += len(mine.feedback)
            if versions | made.versions:
                report.trained_versions = {**report.trained_versions, job: sorted(versions | made.versions)}
            await self._save(report)
        report.status, report.finished = "done", time.time()
        await self._save(report)
        return last

    async def _save(self, report: Report) -> None:
        await self._kv.put(f"{PREFIX}.{report.user}", msgspec.json.encode(report))

    # -- search ------------------------------------------------------------------------------------------------------

    async def _deleted_before(self, user: str) -> defaultdict[str, _Found]:
        """What earlier deletions of a user named, by job: a repeated one finds what was made of it meanwhile."""
        found: defaultdict[str, _Found] = defaultdict(_Found)
        async for message in self._bus.scan(subjects.FEEDBACK, subjects.erasures("*")):
            erasure = _decoded(message.data, Erasure)
            if erasure is not None and erasure.user == user:
                found[message.subject.split(".")[1]].gone.update(erasure.interactions, erasure.feedback)
        return found

    async def _search(self, user: str) -> dict[str, _Found]:
        found = await self._deleted_before(user)
        async for message in self._bus.scan(subjects.INTERACTIONS, f"{subjects.INTERACTIONS.lower()}.>"):
            if PART in message.headers:
                continue
            record = _decoded(await self._whole(subjects.INTERACTIONS, message), Interaction)
            if record is not None and self._names(record, user):
                mine = found[record.job]
                mine.interactions[bare_id(record.id) or record.id].append(message)
                mine.episodes.add(bare_id(record.episode) or record.episode)
        async for message in self._bus.scan(subjects.FEEDBACK, subjects.feedback("*")):
            batch = _decoded(await self._whole(subjects.FEEDBACK, message), FeedbackBatch)
            job = message.subject.rpartition(".")[2]
            mine = found.get(job, _Found())
            items = batch.items if batch is not None else []
            gone = {item.id for item in items if self._names(item, user) or mine.covers(item)}
            if gone:
                found[job].feedback |= gone
                found[job].mixed.append((message, [item for item in items if item.id not in gone]))
        return found

    def _names(self, said: Interaction | Feedback | EpisodeRecord, user: str) -> bool:
        return user in named_users(said.user, said.tags, self._pseudonym)

    async def _whole(self, stream: str, message: Message) -> bytes:
        if count_of(message.headers) == 1:
            return message.data
        whole = (await self._bus.get_whole(stream, [message.seq])).get(message.seq)
        return whole.data if whole is not None else b""

    async def _made(self, user: str, found: Mapping[str, _Found]) -> dict[str, Made]:
        """What jobs made of it, by their ledgers: of those where something was found, and of those that admitted it."""
        made = {job: _made_of(user, mine) for job, mine in found.items()}
        async for message in self._bus.scan(subjects.LEDGER, subjects.ledger("*")):
            job = message.subject.rpartition(".")[2]
            try:
                events = decode_events(message.data)
            except ProtocolError as error:
                logger.error("entry %d of %s cannot be read: %s", message.seq, subjects.LEDGER, error)
                continue
            ledger = made.setdefault(job, _made_of(user, _Found()))
            for event in events:
                ledger.take(event)
        return {job: one for job, one in made.items() if job in found or one.ordinals}

    async def _told(self, job: str, mine: _Found) -> tuple[set[int], set[str]]:
        """Versions that were trained on it, and feedback of the job whose newest fate is a last one, as far as fates
        are still there.
        """
        versions, newest = set[int](), dict[str, str]()
        async for message in self._bus.scan(subjects.DECISIONS, subjects.decisions(job)):
            batch = _decoded(await self._whole(subjects.DECISIONS, message), FateBatch)
            for fate in batch.items if batch is not None else ():
                told = {bare_id(id) or id for id in fate.interactions}
                about = fate.feedback in mine.feedback or not told.isdisjoint(mine.interactions)
                if fate.status == "trained" and about:
                    versions.add(fate.version)
                newest[fate.feedback] = fate.status
            for turn in batch.interactions if batch is not None else ():
                if turn.status == "trained" and (bare_id(turn.interaction) or turn.interaction) in mine.interactions:
                    versions.add(turn.version)
        return versions, {name for name, status in newest.items() if status not in UNDECIDED}

    # -- deletion ----------------------------------------------------------------------------------------------------

    async def _announce(self, user: str, job: str, mine: _Found) -> int:
        """Say which ids do not exist any more; the sequence of that, 0 where there are none."""
        last, interactions, feedback = 0, sorted(mine.interactions), sorted(mine.feedback)
        for start in range(0, max(len(interactions), len(feedback)), NAMED):
            some = slice(start, start + NAMED)
            erasure = Erasure(
                user=user, interactions=interactions[some], feedback=feedback[some], time=time.time()
            )  # fmt: skip
            last = await self._bus.publish(subjects.erasures(job), pack(erasure, job=job))
        return last

    async def _end_episodes(self, user: str, found: Mapping[str, _Found]) -> int:
        """Blank what was opened for the user, or for nobody and they spoke in it; how many. It takes no more requests.

        What is left keeps a later request from being recorded as a turn of an episode that nobody set apart.
        """
        ended = 0
        for found_entry in await self._opened.entries():
            entry: Entry | None = found_entry
            while entry is not None:
                try:
                    record = EpisodeRecord.model_validate_json(entry.value or b"")
                except ValueError:
                    logger.error("the record of episode '%s' cannot be read: nothing in it is deleted", entry.key)
                    break
                names = named_users(record.user, record.tags, self._pseudonym)
                spoke = not names and record.job in found and bare_id(record.id) in found[record.job].episodes
                over = record.ended_at or datetime.now(UTC)
                blank = record.model_copy(update={"user": "", "tags": {}, "group_id": None, "ended_at": over})
                if blank == record or not (spoke or user in names):
                    break
                with contextlib.suppress(Conflict):  # somebody ended it meanwhile
                    data = blank.model_dump_json().encode()
                    await self._opened.overwrite(entry.key, data, entry.revision, keep_s=KEEP_S)
                    ended += 1
                entry = await self._opened.get(entry.key)
        return ended

    async def _rewrite(self, job: str, message: Message, rest: list[Feedback]) -> None:
        """Store what the message holds of others and is undecided once more, then delete it."""
        if rest:
            data = pack(FeedbackBatch(items=rest), job=job)
            await self._bus.publish_whole([Outgoing(subjects.feedback(job), data)])
        await erase_message(self._bus, subjects.FEEDBACK, message)


def _made_of(user: str, mine: _Found) -> Made:
    others = {_target(item) for _, rest in mine.mixed for item in rest}
    return Made(user, mine.interactions.keys() | mine.gone, mine.feedback | mine.gone, others)


def _target(item: Feedback) -> str:
    """The feedback by whose fate an item is over: its own, of a retraction what it retracts."""
    name = str(item.body.get("feedback", "")) if item.kind == "retraction" else item.id
    return bare_id(name) or name


def _decoded(data: bytes, kind: type[T]) -> T | None:
    """What a message holds; None for one that is undecodable, of which nobody can say whose it is."""
    try:
        return unpack(data, kind)[0]
    except ProtocolError:
        return None
