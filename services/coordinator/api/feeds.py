"""Shared readers of job events and job records: one per job, however many clients wait."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from penstock.services.coordinator.api.http.sse import END, PING, PING_S, RETRY, failure
from penstock.services.coordinator.api.http.turns import Turns
from penstock.services.coordinator.jobs.events import JobEvents
from penstock.services.coordinator.jobs.store import JobStore
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.runtime.tasks import end_tasks

__all__ = ["Feeds"]

Row = dict[str, Any]

T = TypeVar("T")
Encode = Callable[[str, int, Row], bytes]
"""Function that encodes an event of a stream as bytes, given the job id, the event id and the event's row."""

POLL_S = 0.25
"""Poll interval for the record of a job that clients wait for, in seconds."""
LINGER_S = 10.0
"""Seconds that a follower lives without readers, so that clients can reconnect to it."""
MAX_KEPT = 2048
"""Number of events that a follower buffers for slow readers. A reader that needs older events reads them from the
stream itself."""
PAGE, CHUNK = 500, 64
"""Maximum number of events in one read for a slow reader, and in one chunk of a stream."""
PER_TURN = 32
"""Maximum number of readers that proceed in one iteration of the event loop."""


class Feeds:
    """Shares one event follower and one record watcher per job among all readers of the job. ``stopping`` ends all
    waits."""

    def __init__(self, jobs: JobStore, events: JobEvents, stopping: asyncio.Event) -> None:
        self._jobs, self._events, self._stopping = jobs, events, stopping
        self._calls: dict[Hashable, asyncio.Task[Any]] = {}
        self._watched: dict[str, _Watched] = {}
        self._followed: dict[str, _Followed] = {}
        self._turns = Turns(PER_TURN)

    async def close(self) -> None:
        """Cancel the tasks of all followers, watchers and shared calls."""
        tasks = [*self._calls.values(), *(watched.task for watched in self._watched.values() if watched.task)]
        tasks += [followed.task for followed in self._followed.values() if followed.task]
        await end_tasks(tasks)

    async def once(self, key: Hashable, keep_s: float, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``call()``. Callers with the same ``key`` within ``keep_s`` seconds share one call."""
        task = self._calls.get(key)
        if task is None:
            loop = asyncio.get_running_loop()
            task = self._calls[key] = loop.create_task(_awaited(call), context=contextvars.Context())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            loop.call_later(keep_s, self._expire, key)
        found: T = await asyncio.shield(task)
        return found

    def _expire(self, key: Hashable) -> None:
        task = self._calls[key]
        if task.done():
            del self._calls[key]
        else:
            task.add_done_callback(lambda _: self._calls.pop(key, None))

    async def until(
        self, record: JobRecord, reached: Callable[[JobRecord], bool], seconds: float
    ) -> JobRecord:  # fmt: skip
        """Wait up to ``seconds`` until ``reached`` returns True for the job's record; return the newest record.

        Raises:
            NotFound: the job does not exist any more.
        """
        job = record.id
        if reached(record) or seconds <= 0 or self._stopping.is_set():
            return record
        watched = self._watched.setdefault(job, _Watched())
        waiter = _Waiter(reached, asyncio.get_running_loop().create_future())
        watched.waiters.add(waiter)
        if watched.task is None:
            watched.task = asyncio.create_task(self._watch(job, watched), context=contextvars.Context())
        try:
            async with asyncio.timeout(seconds):
                return await waiter.found
        except TimeoutError:
            found = await self.once(("job", job), POLL_S / 2, lambda: self._jobs.get(job))
            return found if found.revision >= record.revision else record  # the shared read may be older
        finally:
            watched.waiters.discard(waiter)

    async def _watch(self, job: str, watched: _Watched) -> None:
        """Poll the record of ``job`` while clients wait for it."""
        stop = asyncio.create_task(self._stopping.wait())
        try:
            while watched.waiters:
                await asyncio.wait({stop}, timeout=POLL_S)
                error: PenstockError | None = None
                record: JobRecord | None = None
                try:
                    record = await self._jobs.get(job)
                except PenstockError as raised:
                    error = raised
                for count, waiter in enumerate(list(watched.waiters)):
                    if waiter.found.done():
                        continue
                    if error is not None:
                        waiter.found.set_exception(error)
                    elif record is not None and (stop.done() or waiter.reached(record)):
                        waiter.found.set_result(record)
                    if count % PER_TURN == PER_TURN - 1:
                        await asyncio.sleep(0)
        finally:
            del self._watched[job]
            await end_tasks([stop])

    async def events(self, job: str, *, after: int, encode: Encode) -> AsyncIterator[bytes]:
        """Stream the events of a job with ids above ``after``, including future ones, until the job's last event.

        Each event is read and encoded once for all followers of the job. Readers take turns on the event loop and send
        at most CHUNK events per turn, or a ping. When the service stops, or events cannot be read, the stream breaks
        off and the client resumes.
        """
        yield RETRY
        try:
            followed = await self._follower(job)
            followed.readers += 1
            try:
                async for found in self._past(job, followed, after):
                    await self._turns.wait()
                    yield b"".join(one.encoded(job, encode) for one in found) or PING
            finally:
                followed.readers -= 1
        except PenstockError as error:
            yield failure(error)
            return
        if not self._stopping.is_set():
            yield END

    async def _past(self, job: str, followed: _Followed, place: int) -> AsyncIterator[Sequence[_Event]]:
        """Yield chunks of the events with ids above ``place``. If no event arrives for PING_S seconds, yield an empty
        chunk."""
        while not followed.covers(place):
            first = followed.first  # read before the page: events that the page lacks come after it
            page = await self.once(("events", job, place, first), POLL_S, partial(self._page, job, place))
            for start in range(0, len(page), CHUNK):
                yield page[start : start + CHUNK]
            place = page[-1].seq if page else max(place, first)
        while (found := await followed.past(place, PING_S)) is not None:
            yield found
            place = found[-1].seq if found else place

    async def _page(self, job: str, after: int) -> list[_Event]:
        return [_Event(seq, row) for seq, row in await self._events.page(job, after=after, limit=PAGE)]

    async def _follower(self, job: str) -> _Followed:
        """Return the follower of a job; start one at the newest event if there is none."""
        followed = self._followed.get(job)
        if followed is None:
            newest = await self.once(("newest", job), POLL_S, lambda: self._events.newest(job))
            followed = self._followed.get(job)
        if followed is None:
            followed = self._followed[job] = _Followed(newest)
            followed.task = asyncio.create_task(self._follow(job, followed), context=contextvars.Context())
        return followed

    async def _follow(self, job: str, followed: _Followed) -> None:
        idle, stop = asyncio.create_task(followed.abandoned()), asyncio.create_task(self._stopping.wait())
        reading = asyncio.create_task(self._read(job, followed))
        try:
            await asyncio.wait({idle, stop, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (error := reading.exception()) is not None:
                followed.error = error
        finally:
            if self._followed.get(job) is followed:
                del self._followed[job]
            followed.is_over = True
            followed.wake()
            await end_tasks([idle, stop, reading])

    async def _read(self, job: str, followed: _Followed) -> None:
        following: Any = self._events.follow(job, after=followed.first)
        async with contextlib.aclosing(following) as rows:
            async for seq, row in rows:
                followed.add(_Event(seq, row))
                followed.wake()


class _Waiter:
    """A client that waits until ``reached`` returns True for the job's record."""

    def __init__(self, reached: Callable[[JobRecord], bool], found: asyncio.Future[JobRecord]) -> None:
        self.reached, self.found = reached, found


class _Watched:
    """A job whose record clients wait for."""

    def __init__(self) -> None:
        self.waiters: set[_Waiter] = set()
        self.task: asyncio.Task[None] | None = None


class _Event:
    """An event of a job, and its cached encodings."""

    __slots__ = ("_encoded", "row", "seq")

    def __init__(self, seq: int, row: Row) -> None:
        self.seq, self.row = seq, row
        self._encoded: dict[Encode, bytes] = {}

    def encoded(self, job: str, encode: Encode) -> bytes:
        """Return this event encoded by the function ``encode``. The bytes are cached, so that each function encodes the
        event only once."""
        found = self._encoded.get(encode)
        if found is None:
            found = self._encoded[encode] = encode(job, self.seq, self.row)
        return found


class _Followed:
    """Buffer of the newest events of a job: all events with ids above ``first`` that were read so far."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.readers = 0
        self.is_over = False
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None
        self._kept: deque[_Event] = deque()
        self._waiting: set[asyncio.Future[None]] = set()

    def add(self, event: _Event) -> None:
        """Append the next event; drop the oldest beyond MAX_KEPT."""
        self._kept.append(event)
        if len(self._kept) > MAX_KEPT:
            self.first = self._kept.popleft().seq

    def covers(self, place: int) -> bool:
        """Return True if the buffer dropped no event with an id above ``place``."""
        return place >= self.first

    def wake(self) -> None:
        """Wake the waiting readers: a new event was added, or the follower has ended."""
        waiting, self._waiting = self._waiting, set()
        for reader in waiting:
            if not reader.done():
                reader.set_result(None)

    async def past(self, place: int, within_s: float) -> list[_Event] | None:
        """Wait for events with ids above ``place``, and return at most CHUNK of them.

        Returns [] after ``within_s`` seconds without an event, None at the end of the job or of the follower.

        Raises:
            Unavailable: the buffer dropped events that this reader still needs; its client resumes.
            Exception: the error that ended the follower.
        """
        while True:
            if not self.covers(place):
                raise Unavailable("this reader is too far behind; resume after the last event that it got")
            if found := self._kept_past(place):
                return found
            if self.error is not None:
                raise self.error
            if self.is_over:
                return None
            more = asyncio.get_running_loop().create_future()
            self._waiting.add(more)
            try:
                async with asyncio.timeout(within_s):
                    await more
            except TimeoutError:
                return []
            finally:
                self._waiting.discard(more)

    def _kept_past(self, place: int) -> list[_Event]:
        """Return the first CHUNK buffered events with ids above ``place``.

        The search starts at the newest event, because most readers lack only that one.
        """
        newer = list(takewhile(lambda one: one.seq > place, reversed(self._kept)))
        return newer[::-1][:CHUNK]

    async def abandoned(self) -> None:
        """Return once the follower has had no readers for LINGER_S seconds."""
        empty_s = 0.0
        while empty_s < LINGER_S:
            await asyncio.sleep(1.0)
            empty_s = 0.0 if self.readers else empty_s + 1.0


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    return await call()
