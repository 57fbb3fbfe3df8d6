"""One follower of a job's events, and one reader of its record, for all clients that wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from penstock.services.coordinator.api.control import Control, Row
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.runtime.tasks import end_tasks

__all__ = ["Feeds"]

T = TypeVar("T")

LOOK_S = 0.25
"""Time between two looks at the record of a job for which somebody waits."""
LINGER_S = 10.0
"""A follower without readers ends after this time: clients that lost their connection come back."""
MAX_KEPT = 2048
"""Events that a follower keeps for readers that are behind; one that is further behind reads them by itself."""
PAGE = 500
PER_TURN = 32
"""Readers that are woken in one turn of the loop."""


class Feeds:
    """Followers by job, begun with the first reader of each. ``stopping`` ends all waits."""

    def __init__(self, control: Control, stopping: asyncio.Event) -> None:
        self._control, self._stopping = control, stopping
        self._calls: dict[Hashable, asyncio.Task[Any]] = {}
        self._watched: dict[str, _Watched] = {}
        self._followed: dict[str, _Followed] = {}

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
        """The record of the same job once it is as wanted, or as it is after ``seconds``. Raises as ``Control.get``."""
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

    async def events(self, job: str, *, after: int) -> AsyncIterator[tuple[int, Row]]:
        """``(id, event)`` of a job past ``after``, also those to come, to its last one. Raises as ``Control`` does."""
        followed = await self._follower(job)
        followed.readers += 1
        place = after
        try:
            while not followed.covers(place):
                first = followed.first  # read before the page: what the page does not show came after it
                page = await self.once(
                    ("events", job, place, first), LOOK_S, partial(self._control.events, job, after=place, limit=PAGE)
                )
                for seq, row in page:
                    yield seq, row
                place = page[-1][0] if page else max(place, first)
            async for seq, row in followed.rows(place):
                yield seq, row
        finally:
            followed.readers -= 1

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
        idle = asyncio.create_task(followed.abandoned())
        reading = asyncio.create_task(self._read(job, followed))
        try:
            await asyncio.wait({idle, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (error := reading.exception()) is not None:
                followed.error = error
        finally:
            if self._followed.get(job) is followed:
                del self._followed[job]
            followed.is_over = True
            await followed.wake()
            await end_tasks([idle, reading])

    async def _read(self, job: str, followed: _Followed) -> None:
        following: Any = self._control.follow_events(job, after=followed.first)
        async with contextlib.aclosing(following) as rows:
            async for seq, row in rows:
                followed.add(seq, row)
                await followed.wake()


class _Waiter:
    """A client that waits for a record to be as wanted."""

    def __init__(self, reached: Callable[[JobRecord], bool], found: asyncio.Future[JobRecord]) -> None:
        self.reached, self.found = reached, found


class _Watched:
    """A job for whose record somebody waits."""

    def __init__(self) -> None:
        self.waiters: set[_Waiter] = set()
        self.task: asyncio.Task[None] | None = None


class _Followed:
    """The events of a job past ``first``, of which the newest are kept."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.readers = 0
        self.is_over = False
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None
        self._kept: deque[tuple[int, Row]] = deque()
        self._waiting: set[asyncio.Future[None]] = set()

    def add(self, seq: int, row: Row) -> None:
        """The next event."""
        self._kept.append((seq, row))
        if len(self._kept) > MAX_KEPT:
            self.first = self._kept.popleft()[0]

    def covers(self, place: int) -> bool:
        """All events past ``place`` are kept."""
        return place >= self.first

    async def wake(self) -> None:
        """Tell the readers that there is more."""
        waiting, self._waiting = self._waiting, set()
        for count, reader in enumerate(waiting):
            if not reader.done():
                reader.set_result(None)
            if count % PER_TURN == PER_TURN - 1:
                await asyncio.sleep(0)

    async def rows(self, place: int) -> AsyncIterator[tuple[int, Row]]:
        """Events past ``place``, to the end of the job or of the follower; raises its error.

        A reader that falls behind what is kept breaks off, and its client resumes.
        """
        while True:
            for seq, row in [one for one in self._kept if one[0] > place]:
                yield seq, row
                place = seq
            if self.first > place:
                raise Unavailable("this reader is too far behind; resume after the last event that it got")
            if self._kept and self._kept[-1][0] > place:
                continue
            if self.error is not None:
                raise self.error
            if self.is_over:
                return
            more = asyncio.get_running_loop().create_future()
            self._waiting.add(more)
            try:
                await more
            finally:
                self._waiting.discard(more)

    async def abandoned(self) -> None:
        """Return once there was no reader for LINGER_S."""
        empty_s = 0.0
        while empty_s < LINGER_S:
            await asyncio.sleep(1.0)
            empty_s = 0.0 if self.readers else empty_s + 1.0


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    return await call()
