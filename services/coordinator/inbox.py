"""Facts that wait until the leader of a job takes them in, one at a time and in order, between its decisions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.shared.runtime.tasks import WorkSlice

__all__ = ["Inbox"]

MAX_FACTS = 4096

T = TypeVar("T")


class Inbox:
    """Queue of facts. A fact is a coroutine function that takes it in; with a full inbox, ``put`` waits."""

    def __init__(self, max_facts: int = MAX_FACTS) -> None:
        self._facts: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue(max_facts)

    async def put(self, fact: Callable[[], Awaitable[None]]) -> None:
        """Add a fact."""
        await self._facts.put(fact)

    async def ask(self, fact: Callable[[], Awaitable[T]]) -> T:
        """Add a fact, and return its result once the leader has taken it in."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def answered() -> None:
            result = await fact()
            if not done.done():
                done.set_result(result)

        await self._facts.put(answered)
        return await done

    def wake(self) -> None:
        """Make ``take`` return soon."""
        with contextlib.suppress(asyncio.QueueFull):  # a full inbox wakes the leader anyway
            self._facts.put_nowait(_nothing)

    async def take(self, within_s: float, *, rest_s: float | None = None) -> None:
        """Wait for a fact, then take in all facts that are there, within the same time: one decision for many groups.

        Later facts stay, because the leader checks the desired state and deadlines in between. ``rest_s``: longest wait
        for the first fact; None is ``within_s``.
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
