"""Facts that wait until the leader of a job takes them in: one at a time, in order, between its decisions."""

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
    """A fact is a coroutine function that takes it in; whoever brings one while the inbox is full waits."""

    def __init__(self, max_facts: int = MAX_FACTS) -> None:
        self._facts: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue(max_facts)

    async def put(self, fact: Callable[[], Awaitable[None]]) -> None:
        """Bring a fact."""
        await self._facts.put(fact)

    async def ask(self, fact: Callable[[], Awaitable[T]]) -> T:
        """Bring a fact and return what taking it in gave."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def answered() -> None:
            result = await fact()
            if not done.done():
                done.set_result(result)

        await self._facts.put(answered)
        return await done

    def wake(self) -> None:
        """Have ``take`` return soon."""
        with contextlib.suppress(asyncio.QueueFull):  # so much is there that nobody has to be woken
            self._facts.put_nowait(_nothing)

    async def take(self, within_s: float, *, rest_s: float | None = None) -> None:
        """Wait for a fact, then take in all that are there, for no longer than that: one decision for many groups.

        What comes meanwhile, or does not fit in, stays: the desired state and deadlines are checked in between.
        ``rest_s``: longest wait for the first fact; None: as long as for the others.
        """
        try:
            async with asyncio.timeout(within_s if rest_s is None else rest_s):
                fact = await self._facts.get()
        except TimeoutError:
            return
        until = time.monotonic() + within_s  # a fact may ask the bus for what it is about
        slice_ = WorkSlice()
        await fact()
        for _ in range(self._facts.qsize()):
            if time.monotonic() >= until:
                break
            await slice_.end()
            await self._facts.get_nowait()()


async def _nothing() -> None:
    return
