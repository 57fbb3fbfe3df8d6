"""Keeps the projection (SQLite tables of feedback) up to date in the background, and answers queries by id from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock.services.coordinator.feedback.ingest import Known
from penstock.services.coordinator.feedback.projection import (
    LeaderEpochs,
    Place,
    Projection,
    Target,
    drop_abandoned,
    open_projection,
)
from penstock.shared.errors import ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import (
    EPISODE_HEADER,
    Erasure,
    Feedback,
    FeedbackBatch,
    FeedbackIds,
    FeedbackStatus,
    InteractionStatus,
    StatusBatch,
    bare_id,
)
from penstock.shared.protocol.parts import PART, count_of
from penstock.shared.transport.bus import Bus, Message

__all__ = ["FeedbackIndex"]

log = logging.getLogger(__name__)

T = TypeVar("T")

STREAMS = (subjects.FEEDBACK, subjects.DECISIONS, subjects.INTERACTIONS)
QUEUE = 1024
TOGETHER, TOGETHER_BYTES = 256, 1 << 20
"""Maximum number of messages, and of bytes, in one write transaction. A larger transaction would delay requests that
wait until one of its items is written."""
CAUGHT_UP_S = 5.0
"""Longest time that a request waits for the projection (seconds)."""
POLL_S = 0.05
RETRY_S = 1.0
TARGETS = 65_536
"""Maximum number of interactions and episodes whose ids are kept in memory; other ids need a query."""


class _Damaged(Exception):  # noqa: N818
    """Raised when the database file must not be read any more."""


@dataclass(slots=True)
class _Read:
    """Decoded contents of messages from the streams FEEDBACK, DECISIONS and INTERACTIONS."""

    posts: list[tuple[int, Feedback]] = field(default_factory=list)
    kept: list[tuple[int, Feedback]] = field(default_factory=list)
    """Items of which only the ids are stored."""
    statuses: list[FeedbackStatus] = field(default_factory=list)
    decided: list[tuple[str, InteractionStatus]] = field(default_factory=list)
    """``(job, decision on one of its interactions)``."""
    erasures: list[Erasure] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


class FeedbackIndex:
    """Index of stored feedback: implements ``ingest.Index`` with the projection (SQLite tables) of this process."""

    def __init__(self, bus: Bus, directory: Path) -> None:
        self.on_projected: Callable[[int], None] = lambda seq: None
        self.erased: set[str] = set()
        self._bus, self.directory = bus, directory
        self._projection: Projection | None = None
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="feedback-read")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="feedback-write")
        self._places: dict[str, Place] = {}
        self._queue: asyncio.Queue[tuple[str, Message]] = asyncio.Queue(QUEUE)
        self._caught_up, self._damaged = asyncio.Event(), asyncio.Event()
        self._targets: OrderedDict[str, None] = OrderedDict()
        self._all_targets = False
        """True if ``_targets`` contains all recorded interactions and episodes, so that no id needs a query."""

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the projection up to date until cancelled; rebuild a damaged file."""
        try:
            while True:
                try:
                    await self._keep_up()
                except* _Damaged as found:
                    log.error("the feedback index is built anew from the streams: %s", found.exceptions[0])
                await self._discard()
                await asyncio.sleep(RETRY_S)
        finally:
            self._caught_up.clear()
            for pool in (self._reading, self._writing):
                pool.shutdown(wait=True)
            if self._projection is not None:
                self._projection.close()
            self._projection = None

    async def _keep_up(self) -> None:
        """Read the streams until cancelled. Raises an ExceptionGroup of _Damaged."""
        self._damaged.clear()
        self._queue = asyncio.Queue(QUEUE)
        async with asyncio.TaskGroup() as tasks:
            projection = await self._load()
            for stream in STREAMS:
                tasks.create_task(self._follow(stream))
            tasks.create_task(self._index_messages(projection))
            tasks.create_task(self._watch_catch_up())
            tasks.create_task(self._watch_damage())

    async def _load(self) -> Projection:
        try:
            await self._write(self._open)
            projection = self._projection
            assert projection is not None
            await self._find_places(projection)
            self.erased |= await self._write(projection.all_erased)
            some = await self._write(projection.some_targets, TARGETS + 1)
        except sqlite3.DatabaseError as error:
            raise _damage(error) from error
        self._targets, self._all_targets = OrderedDict.fromkeys(some), len(some) <= TARGETS
        return projection

    async def _watch_damage(self) -> None:
        await self._damaged.wait()
        raise _Damaged("a question to it failed")

    async def _discard(self) -> None:
        """Remove the database file, once the running queries have ended."""
        self._caught_up.clear()
        projection, self._projection = self._projection, None
        await asyncio.get_running_loop().run_in_executor(self._reading, lambda: None)  # waits for running queries
        if projection is not None:
            await self._write(projection.discard)

    async def forget_abandoned(self) -> None:
        """Delete the indexes that processes left when they ended. Otherwise a user's data would stay in them even after
        its deletion."""
        await self._write(drop_abandoned, self.directory)

    def _open(self) -> None:
        self._projection = open_projection(self.directory)

    async def _find_places(self, projection: Projection) -> None:
        """Load the positions up to which the streams are indexed. If a stream was replaced since, clear the projection
        and read all streams from the start."""
        known = await self._write(projection.places)
        states = {stream: await self._state(stream) for stream in STREAMS}
        if any(known[s][1] != created or known[s][2] > last for s, (created, last) in states.items() if s in known):
            log.warning("the streams were made anew: the feedback index of this process begins again")
            await self._write(projection.clear)
            known = {}
        self._places = {s: known.get(s, (s, created, 0)) for s, (created, _) in states.items()}

    async def _state(self, stream: str) -> tuple[str, int]:
        while True:
            try:
                state = await self._bus.stream_state(stream)
                return state.created, state.last_seq
            except Unavailable as error:
                log.info("the feedback index waits for %s: %s", stream, error)
                await asyncio.sleep(RETRY_S)

    async def _follow(self, stream: str) -> None:
        only_headers = stream == subjects.INTERACTIONS
        while True:
            start = self._places[stream][2] + 1
            reader = self._bus.follow(stream, f"{stream.lower()}.>", start_seq=start, headers_only=only_headers)
            try:
                async with contextlib.aclosing(reader):
                    async for message in reader:
                        await self._queue.put((stream, await self._whole(stream, message)))
            except Unavailable as error:
                log.info("%s is not followed: %s", stream, error)
            await asyncio.sleep(RETRY_S)

    async def _whole(self, stream: str, message: Message) -> Message:
        if stream == subjects.INTERACTIONS or count_of(message.headers) == 1:
            return message
        return (await self._bus.get_whole(stream, [message.seq])).get(message.seq, message)

    async def _index_messages(self, projection: Projection) -> None:
        """Write queued messages to the projection, in one transaction for all messages that have arrived, up to a
        limit."""
        while True:
            some = [await self._queue.get()]
            nbytes = len(some[0][1].data)
            while len(some) < TOGETHER and nbytes < TOGETHER_BYTES and not self._queue.empty():
                some.append(self._queue.get_nowait())
                nbytes += len(some[-1][1].data)
            places = {stream: (stream, self._places[stream][1], message.seq) for stream, message in some}
            read = await self._stored(projection, some, list(places.values()))
            self._places |= places
            self._remember(read)
            if subjects.FEEDBACK in places:
                self.on_projected(places[subjects.FEEDBACK][2])

    async def _stored(self, projection: Projection, some: list[tuple[str, Message]], places: list[Place]) -> _Read:
        while True:
            try:
                return await self._write(_apply, projection, some, places)
            except sqlite3.OperationalError as error:  # no disk space, or a temporary lock
                log.error("the feedback index cannot be written: %s", error)
                await asyncio.sleep(RETRY_S)
            except sqlite3.DatabaseError as error:
                raise _damage(error) from error

    async def _watch_catch_up(self) -> None:
        """Set ``_caught_up`` once the newest message of FEEDBACK is indexed."""
        while not self._caught_up.is_set():
            with contextlib.suppress(Unavailable):
                newest = await self._bus.last(subjects.FEEDBACK, f"{subjects.FEEDBACK.lower()}.>")
                if newest is None or self._places[subjects.FEEDBACK][2] >= newest.seq:
                    self._caught_up.set()
            await asyncio.sleep(POLL_S)

    def _remember(self, read: _Read) -> None:
        for erasure in read.erasures:
            self.erased.update(erasure.interactions, erasure.feedback)
        for target, _, _ in read.targets:
            self._targets[target] = None
            self._targets.move_to_end(target)
        while len(self._targets) > TARGETS:
            self._targets.popitem(last=False)
            self._all_targets = False

    # -- questions ---------------------------------------------------------------------------------------------------

    async def known(self, ids: Sequence[str]) -> dict[str, Known]:
        """Return the stored items among ``ids``, by id; see ``Index.known``."""
        projection = await self._ready()
        return await self._read(projection.known, ids)

    async def targets(self, ids: Sequence[str]) -> set[str]:
        """Return those of ``ids`` (interactions, episodes) that were recorded."""
        found = {id for id in ids if id in self._targets}
        rest = [id for id in ids if id not in found]
        if rest and not self._all_targets and self._projection is not None:
            found |= await self._read(self._projection.targets, rest)
        return found

    async def episodes(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the episode of each interaction of ``ids`` that was recorded in an episode."""
        projection = await self._ready()
        return await self._read(projection.episodes, ids)

    async def turns(self, episode: str, after: str, limit: int) -> list[str]:
        """Return interactions of an episode; see ``Projection.turns``."""
        projection = await self._ready()
        return await self._read(projection.turns, episode, after, limit)

    async def status_of(self, id: str) -> dict[str, Any] | None:
        """Return the row of an item, or None if it is unknown."""
        projection = await self._ready()
        return await self._read(projection.status_of, id)

    async def decided(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return decisions on interactions; see ``Projection.decided``."""
        projection = await self._ready()
        return await self._read(projection.decided, ids)

    async def outcomes(self, job: str) -> list[tuple[str, str, int]]:
        """Return the counts of decided interactions of a job; see ``Projection.outcomes``."""
        projection = await self._ready()
        return await self._read(projection.outcomes, job)

    async def held(self, jobs: Sequence[str] | None, after: str, limit: int) -> list[dict[str, Any]]:
        """Return the quarantined items of ``jobs`` (of all jobs if None); see ``Projection.held``."""
        projection = await self._ready()
        return await self._read(projection.held, jobs, after, limit)

    async def funnel(self, job: str) -> list[tuple[str, str, str, int]]:
        """Return ``(metric or kind, source, status, number of items)`` for the feedback of a job."""
        projection = await self._ready()
        return await self._read(projection.funnel, job)

    async def reach(self, seq: int, deadline_s: float, *, stream: str = subjects.FEEDBACK) -> None:
        """Wait until a stream is indexed up to ``seq``. Raises Unavailable after ``deadline_s`` seconds."""
        end = asyncio.get_running_loop().time() + deadline_s
        while self._places.get(stream, ("", "", 0))[2] < seq:
            if asyncio.get_running_loop().time() > end:
                raise Unavailable(f"the feedback index did not reach message {seq} of {stream} within {deadline_s:g} s")
            await asyncio.sleep(POLL_S / 5)

    async def catch_up(self, *streams: str) -> None:
        """Wait until the index contains all messages that are in ``streams`` now, whichever replica stored them.

        Raises:
            Unavailable: it took longer than CAUGHT_UP_S.
        """
        for stream in streams:
            newest = await self._bus.last(stream, f"{stream.lower()}.>")
            if newest is not None:
                await self.reach(newest.seq, CAUGHT_UP_S, stream=stream)

    async def _ready(self) -> Projection:
        try:
            async with asyncio.timeout(CAUGHT_UP_S):
                await self._caught_up.wait()
        except TimeoutError:
            raise Unavailable("the index of feedback is still being read; retry in a moment") from None
        if self._projection is None:
            raise Unavailable("the index of feedback is closed")
        return self._projection

    async def _read(self, ask: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reading, ask, *args)
        except sqlite3.DatabaseError as error:
            if type(error) is sqlite3.DatabaseError:  # its subclasses do not mean damage
                self._damaged.set()
            raise Unavailable(f"the index of feedback cannot be read now: {error}; retry in a moment") from error

    async def _write(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writing, work, *args)


def _damage(error: sqlite3.DatabaseError) -> Exception:
    """Return ``_Damaged`` if ``error`` means that the file is damaged, else ``error`` itself. sqlite3 reports damage by
    the class DatabaseError itself, and other errors by subclasses of it."""
    return _Damaged(str(error)) if type(error) is sqlite3.DatabaseError else error


def _apply(projection: Projection, some: list[tuple[str, Message]], places: list[Place]) -> _Read:
    """Decode messages, apply them to the projection, and return their contents. Runs in the writing thread."""
    read, leaders = _Read(), LeaderEpochs(projection.leaders.epochs)
    for stream, message in some:
        try:
            _take(read, stream, message, leaders)
        except ProtocolError as error:
            log.error("message %d of %s is left out of the feedback index: %s", message.seq, stream, error)
    projection.apply(
        read.posts,
        read.statuses,
        read.erasures,
        read.targets,
        places,
        decided=read.decided,
        kept=read.kept,
        epochs=leaders.epochs,
    )
    return read


def _take(read: _Read, stream: str, message: Message, leaders: LeaderEpochs) -> None:
    if PART in message.headers:
        return
    if stream == subjects.INTERACTIONS:
        id, episode = bare_id(message.subject.rpartition(".")[2]), bare_id(message.headers.get(EPISODE_HEADER, ""))
        read.targets += [(id, episode or "", message.seq)] if id is not None else []
        read.targets += [(episode, "", 0)] if episode is not None else []
    elif stream == subjects.DECISIONS:
        batch, envelope = unpack(message.data, StatusBatch)
        job = message.subject.rpartition(".")[2]
        if not leaders.is_gone(job, envelope.epoch):
            read.statuses += batch.items
            read.decided += [(job, item) for item in batch.interactions]
    elif message.subject.endswith(".erased"):
        read.erasures.append(unpack(message.data, Erasure)[0])
    elif message.subject.endswith(".ids"):
        read.kept += unpack(message.data, FeedbackIds)[0].items(message.subject.split(".")[1])
    else:
        read.posts += [(message.seq, item) for item in unpack(message.data, FeedbackBatch)[0].items]
