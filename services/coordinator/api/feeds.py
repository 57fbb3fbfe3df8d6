"""One follower of a job's events, and one reader of its record, for all clients that wait for them."""

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
from penstock.services.coordinator.control import CoordinatorControl
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.runtime.tasks import end_tasks

__all__ = ["Feeds"]

Row = dict[str, Any]

T = TypeVar("T")
Encode = Callable[[str, int, Row], bytes]
"""Makes the bytes of an event in a stream of the job, the id and the row."""

LOOK_S = 0.25
"""Time between two looks at the record of a job for which somebody waits."""
LINGER_S = 10.0
"""A follower without readers ends after this time: clients that lost their connection come back."""
MAX_KEPT = 2048
"""Events that a follower keeps for readers that are behind; one that is further behind reads them by itself."""
PAGE, CHUNK = 500, 64
"""Events that are read at once for a reader that is behind, and those that it sends in one turn."""
PER_TURN = 32
"""Readers that go on in one turn of the loop."""


class Feeds:
    """Followers by job, begun with the first reader of each. ``stopping`` ends all waits."""

    def __init__(self, control: CoordinatorControl, stopping: asyncio.Event) -> None:
        self._control, self._stopping = control, stopping
        self._calls: dict[Hashable, asyncio.Task[Any]] = {}
        self._watched: dict[str, _Watched] = {}
        self._followed: dict[str, _Followed] = {}
        self._turns = Turns(PER_TURN)

    async def close(self) -> None:
        """End everything."""
        tasks = [*self._calls.values(), *(watched.task for watched in self._watched.values() if watched.task)]
        tasks += [followed.task for followed in self._followed.values() if followed.task]
        await end_tasks(tasks)

    async def once(self, key: Hashable, keep_s: float, call: Callable[[], Awaitable[T]]) -> T:
        """The result of ``call()``, made once for all who ask by this ``key`` within ``keep_s``. Raises as it does."""
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
        """The record of the same job once it is as wanted, or as it is after ``seconds``. Raises NotFound."""
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
            found = await self.once(("job", job), LOOK_S / 2, lambda: self._control.get(job))
            return found if found.revision >= record.revision else record  # that look may have been earlier
        finally:
            watched.waiters.discard(waiter)

    async def _watch(self, job: str, watched: _Watched) -> None:
        """Look at a record while somebody waits for it."""
        stop = asyncio.create_task(self._stopping.wait())
        try:
            while watched.waiters:
                await asyncio.wait({stop}, timeout=LOOK_S)
                error: PenstockError | None = None
                record: JobRecord | None = None
                try:
                    record = await self._control.get(job)
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
        """The event stream of a job past ``after``, also of events to come, to its last one.

        Each event is read and encoded once for all who follow the job. Readers go on in turns, with CHUNK events at
        most: whether they catch up, hear of news or of a silence. When the service stops, or the events cannot be read,
        the stream breaks off and the client resumes.
        """
        yield RETRY
        try:
            followed = await self._follower(job)
            followed.readers += 1
            try:
                async for found in self._past(job, followed, after):
                    await self._turns.mine()
                    yield b"".join(one.encoded(job, encode) for one in found) or PING
            finally:
                followed.readers -= 1
        except PenstockError as error:
            yield failure(error)
            return
        if not self._stopping.is_set():
            yield END

    async def _past(self, job: str, followed: _Followed, place: int) -> AsyncIterator[Sequence[_Event]]:
        """Events past ``place``, some at once; none where none came for PING_S."""
        while not followed.covers(place):
            first = followed.first  # read before the page: what the page does not show came after it
            page = await self.once(("events", job, place, first), LOOK_S, partial(self._page, job, place))
            for start in range(0, len(page), CHUNK):
                yield page[start : start + CHUNK]
            place = page[-1].seq if page else max(place, first)
        while (found := await followed.past(place, PING_S)) is not None:
            yield found
            place = found[-1].seq if found else place

    async def _page(self, job: str, after: int) -> list[_Event]:
        return [_Event(seq, row) for seq, row in await self._control.events(job, after=after, limit=PAGE)]

    async def _follower(self, job: str) -> _Followed:
        """The follower of a job, which begins at its newest event."""
        followed = self._followed.get(job)
        if followed is None:
            newest = await self.once(("newest", job), LOOK_S, lambda: self._control.newest_event(job))
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
        following: Any = self._control.follow_events(job, after=followed.first)
        async with contextlib.aclosing(following) as rows:
            async for seq, row in rows:
                followed.add(_Event(seq, row))
                followed.wake()


class _Waiter:
    """A client that waits for a record to be as wanted."""

    def __init__(self, reached: Callable[[JobRecord], bool], found: asyncio.Future[JobRecord]) -> None:
        self.reached, self.found = reached, found


class _Watched:
    """A job for whose record somebody waits."""

    def __init__(self) -> None:
        self.waiters: set[_Waiter] = set()
        self.task: asyncio.Task[None] | None = None


class _Event:
    """An event of a job, and what was encoded of it."""

    __slots__ = ("_encoded", "row", "seq")

    def __init__(self, seq: int, row: Row) -> None:
        self.seq, self.row = seq, row
        self._encoded: dict[Encode, bytes] = {}

    def encoded(self, job: str, encode: Encode) -> bytes:
        """Bytes for a stream."""
        found = self._encoded.get(encode)
        if found is None:
            found = self._encoded[encode] = encode(job, self.seq, self.row)
        return found


class _Followed:
    """The events of a job past ``first``, of which the newest are kept."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.readers = 0
        self.is_over = False
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None
        self._kept: deque[_Event] = deque()
        self._waiting: set[asyncio.Future[None]] = set()

    def add(self, event: _Event) -> None:
        """The next event."""
        self._kept.append(event)
        if len(self._kept) > MAX_KEPT:
            self.first = self._kept.popleft().seq

    def covers(self, place: int) -> bool:
        """All events past ``place`` are kept."""
        return place >= self.first

    def wake(self) -> None:
        """Tell the readers that there is more."""
        waiting, self._waiting = self._waiting, set()
        for reader in waiting:
            if not reader.done():
                reader.set_result(None)

    async def past(self, place: int, within_s: float) -> list[_Event] | None:
        """Some events past ``place``, [] where none came within that time; None at the end of the job or of the
        follower. Raises its error.

        A reader that falls behind what is kept breaks off, and its client resumes.
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
        """The first CHUNK of what is kept past ``place``; most readers lack the newest event only."""
        newer = list(takewhile(lambda one: one.seq > place, reversed(self._kept)))
        return newer[::-1][:CHUNK]

    async def abandoned(self) -> None:
        """Return once there was no reader for LINGER_S."""
        empty_s = 0.0
        while empty_s < LINGER_S:
            await asyncio.sleep(1.0)
            empty_s = 0.0 if self.readers else empty_s + 1.0


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    return await call()
