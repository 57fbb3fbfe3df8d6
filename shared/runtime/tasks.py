"""Deadlines, retries and background tasks: every wait has an end, every task has an owner."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from penstock.shared.errors import DeadlineError

__all__ = [
    "Background",
    "Deadline",
    "Inbox",
    "WorkSlice",
    "end_tasks",
    "first_error",
    "raise_if_cancelled",
    "retry",
    "together",
    "unexpected",
    "wait_for",
]

T = TypeVar("T")
MAX_FACTS = 4096
AGAIN_S = 30.0
"""Time after which `end_tasks` cancels a task again; longer than any task's cleanup (seconds)."""
_ended: WeakSet[asyncio.Task[Any]] = WeakSet()
"""Tasks that `end_tasks` has cancelled."""


class Deadline:
    """Deadline that is ``seconds`` from now (monotonic clock); the steps of one operation share one deadline."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def over(self) -> bool:
        """True if the deadline has passed."""
        return self.left_s == 0.0

    def check(self, what: str) -> None:
        """Raise DeadlineError, naming ``what``, if the deadline has passed."""
        if self.over:
            raise DeadlineError(f"no {what} within {self.seconds:g} s")


class WorkSlice:
    """Keeps a long loop from blocking the event loop: ``await end()`` after each item.

    Other tasks run after every ``seconds`` of work, each time for at least ``rest_s`` seconds.
    """

    def __init__(self, seconds: float = 0.01, *, rest_s: float = 0.0) -> None:
        self.seconds, self.rest_s = seconds, rest_s
        self._began = time.monotonic()

    async def end(self) -> None:
        """Mark the end of the work on one item; let other tasks run if this slice of work has lasted ``seconds``."""
        if time.monotonic() - self._began >= self.seconds:
            await asyncio.sleep(self.rest_s)
            self._began = time.monotonic()


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled. Until Python 3.13 this check is needed after a TaskGroup that
    failed, because such a TaskGroup drops the cancellation."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def unexpected(work: Awaitable[None]) -> Exception | None:
    """Await ``work``; return the exception that ended it (of any type), or None. This keeps a bug in one task from
    ending other tasks.

    The work has a task of its own: until Python 3.13 a TaskGroup whose tasks fail at the end of its block leaves its
    task marked as cancelled, and one that fails while its task is cancelled drops the cancellation.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        while not task.done():
            try:
                await end_tasks([task])
            except asyncio.CancelledError:  # a further one, which is for the work too
                task.cancel()
        raise
    try:
        task.result()
    except Exception as error:  # returned to the caller, with its traceback
        return error
    return None


def first_error(error: BaseException) -> BaseException:
    """Return the first error in an exception group, at any depth. If ``error`` is not a group, return ``error``
    itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. If one fails, cancel the others, wait until they
    have ended, and raise its error."""
    running = [asyncio.create_task(work) for work in works]
    try:
        if running:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for task in running:
                if task.done():
                    task.result()
        return [task.result() for task in running]
    finally:
        await end_tasks(running)


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, by cancellation or otherwise.

    Each task is cancelled once: its cleanup continues if this wait is cancelled, or if a second wait begins. A task
    that has not ended after AGAIN_S may have lost its cancellation, and is cancelled again.
    """
    for task in tasks:
        if task not in _ended:  # not `cancelling`, which also counts a timeout inside the task
            _ended.add(task)
            task.cancel()
    left = set(tasks)
    while left:
        over, left = await asyncio.wait(left, timeout=AGAIN_S)
        for task in over:
            if not task.cancelled():
                task.exception()  # mark the exception as retrieved
        for task in left:
            task.cancel()


async def wait_for(awaitable: Awaitable[T], deadline_s: float, what: str) -> T:
    """Await ``awaitable`` with a deadline, and return its result.

    Raises:
        DeadlineError: the deadline passed; the message names ``what``. The awaitable is cancelled.
    """
    try:
        async with asyncio.timeout(deadline_s) as scope:
            return await awaitable
    except TimeoutError:
        if not scope.expired():
            raise  # raised by the awaitable itself
        raise DeadlineError(f"waited {deadline_s:g} s for {what}") from None


async def retry(
    attempt: Callable[[], Awaitable[T]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    deadline_s: float,
    what: str,
    first_pause_s: float = 0.05,
    longest_pause_s: float = 2.0,
) -> T:
    """Repeat ``attempt`` while it raises one of the errors ``on``, with doubling, randomised pauses; return its result.

    Raises:
        DeadlineError: no attempt succeeded in time; the message names ``what``, and the last error unless the last
            attempt was cut off.
    """
    deadline = Deadline(deadline_s)
    pause_s = first_pause_s
    while True:
        try:
            return await wait_for(attempt(), deadline.left_s, what)
        except DeadlineError:
            raise
        except on as error:
            wait_s = random.uniform(0.5, 1.0) * pause_s
            if wait_s >= deadline.left_s:
                raise DeadlineError(f"{what} did not succeed within {deadline_s:g} s: {error}") from error
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, longest_pause_s)


class Background:
    """Tasks that live as long as an ``async with`` block.

    At the end of the block they are cancelled and awaited. If a task raises, the block and the other tasks are
    cancelled and the block raises the task's error (alone if it is the only one, otherwise in an ExceptionGroup).
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task; ``name`` appears in logs and debuggers."""
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Inbox:
    """Queue of updates for the leader of a job. The leader applies them one at a time, in order, between its decisions.

    An update (``fact``) is a coroutine function that the leader calls.
    """

    def __init__(self, max_facts: int = MAX_FACTS) -> None:
        self._facts: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue(max_facts)

    async def put(self, fact: Callable[[], Awaitable[None]]) -> None:
        """Add an update; wait while the queue is full."""
        await self._facts.put(fact)

    async def ask(self, fact: Callable[[], Awaitable[T]]) -> T:
        """Add an update, and return its result once the leader has applied it."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def answered() -> None:
            result = await fact()
            if not done.done():
                done.set_result(result)

        await self._facts.put(answered)
        return await done

    def wake(self) -> None:
        """Make the current or the next ``take`` return without waiting for an update."""
        with contextlib.suppress(asyncio.QueueFull):  # a full inbox wakes the leader anyway
            self._facts.put_nowait(_nothing)

    async def take(self, within_s: float, *, rest_s: float | None = None) -> None:
        """Wait for an update, then apply queued updates for at most ``within_s`` seconds, so that the leader's next
        decision considers many updates at once.

        Later updates stay queued, because the leader checks the desired state and deadlines in between. ``rest_s``:
        longest wait for the first update (seconds); None: ``within_s``.
        """
        try:
            async with asyncio.timeout(within_s if rest_s is None else rest_s):
                fact = await self._facts.get()
        except TimeoutError:
            return
        until = time.monotonic() + within_s  # a fact may read from the bus
        slice_ = WorkSlice()
        await fact()
        for _ in range(self._facts.qsize()):
            if time.monotonic() >= until:
                break
            await slice_.end()
            await self._facts.get_nowait()()


async def _nothing() -> None:
    return
