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

from penstock.shared.errors import Conflict, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.episode import KEEP_S, EpisodeRecord
from penstock.shared.protocol.events import Admitted, decode_events
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
from penstock.shared.protocol.trajectory import parse_group_header
from penstock.shared.transport.bus import Bus, Message, Outgoing
from penstock.shared.transport.kv import Entry

__all__ = ["Eraser", "Report"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

PREFIX = "erasure"
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

    def covers(self, item: Feedback) -> bool:
        """Whether an item is about one of these interactions or episodes."""
        targets = (item.inference, item.body.get("rejected"))
        return item.episode in self.episodes or any(id in self.interactions for id in targets)


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
        last, found = 0, await self._search(report.user)
        report.episodes += await self._end_episodes(report.user, found)
        for job, mine in found.items():
            erasure = Erasure(
                user=report.user, interactions=sorted(mine.interactions), feedback=sorted(mine.feedback),
                time=time.time(),
            )  # fmt: skip
            last = max(last, await self._bus.publish(subjects.erasures(job), pack(erasure, job=job)))
            versions, decided = await self._told(job, mine)
            report.groups += await self._erase_groups(job, mine)
            for message, rest in mine.mixed:
                await self._rewrite(job, message, [item for item in rest if _target(item) not in decided])
            for message in chain.from_iterable(mine.interactions.values()):
                await self._erase(subjects.INTERACTIONS, message)
            report.interactions += len(mine.interactions)
            report.feedback += len(mine.feedback)
            if versions:
                report.trained_versions = {**report.trained_versions, job: versions}
            await self._save(report)
        report.status, report.finished = "done", time.time()
        await self._save(report)
        return last

    async def _save(self, report: Report) -> None:
        await self._kv.put(f"{PREFIX}.{report.user}", msgspec.json.encode(report))

    # -- search ------------------------------------------------------------------------------------------------------

    async def _search(self, user: str) -> dict[str, _Found]:
        found: dict[str, _Found] = defaultdict(_Found)
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

    async def _told(self, job: str, mine: _Found) -> tuple[list[int], set[str]]:
        """Versions that were trained on it, and all feedback of the job whose newest fate is a last one."""
        versions, newest = set[int](), dict[str, str]()
        async for message in self._bus.scan(subjects.DECISIONS, subjects.decisions(job)):
            batch = _decoded(message.data, FateBatch)
            for fate in batch.items if batch is not None else ():
                told = {bare_id(id) or id for id in fate.interactions}
                about = fate.feedback in mine.feedback or not told.isdisjoint(mine.interactions)
                if fate.status == "trained" and about:
                    versions.add(fate.version)
                newest[fate.feedback] = fate.status
            for turn in batch.interactions if batch is not None else ():
                if turn.status == "trained" and (bare_id(turn.interaction) or turn.interaction) in mine.interactions:
                    versions.add(turn.version)
        return sorted(versions), {name for name, status in newest.items() if status not in UNDECIDED}

    # -- deletion ----------------------------------------------------------------------------------------------------

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
        await self._erase(subjects.FEEDBACK, message)

    async def _erase_groups(self, job: str, mine: _Found) -> int:
        """Delete the trajectories that were made of the interactions; how many. One that waits for training is lost."""
        ordinals: set[int] = set()
        async for message in self._bus.scan(subjects.LEDGER, subjects.ledger(job)):
            for event in decode_events(message.data):
                for admission in event.admissions if isinstance(event, Admitted) else ():
                    about = {bare_id(id) or id for id in (*admission.interactions, *admission.context)}
                    told = set() if admission.interactions else mine.feedback & admission.feedback.keys()
                    if told or not mine.interactions.keys().isdisjoint(about):
                        ordinals.add(admission.ordinal)
        if not ordinals:
            return 0
        erased = 0
        async for message in self._bus.scan(subjects.EXPERIENCE, subjects.experience(job), headers_only=True):
            try:
                header = parse_group_header(message.headers)
            except ProtocolError:
                continue
            if header.draw.ordinal in ordinals:
                await self._erase(subjects.EXPERIENCE, message)
                erased += 1
        return erased

    async def _erase(self, stream: str, message: Message) -> None:
        """Overwrite a payload and delete it, its first message last: while that stands, a search finds the rest."""
        for place in reversed(range(count_of(message.headers))):
            await self._bus.delete_message(stream, message.seq + place)


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
