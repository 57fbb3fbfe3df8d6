"""Per-caller limits on resources of this process: concurrent requests, large bodies being read, and parser threads.

A caller at its own limit is refused or waits, while other callers are served. Keys of episodes and tokens count for the
key that created them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.config.service import ServiceSettings

__all__ = ["LargeBody", "Occupancy"]

T = TypeVar("T")

IN_THREAD_BYTES = 16 << 10
"""Bodies longer than this (bytes) are parsed in a thread."""
NUM_PARSERS = 2
WAIT_S = 10.0
"""Longest wait for a slot, in seconds."""


class Occupancy:
    """Limits concurrent requests per owner. Limits large bodies and parser threads per owner, and also in total.

    An owner is the id of an API key, or the client's address in a deployment without keys.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._most = settings.key_concurrency
        self._requests: Counter[str] = Counter()
        self._large = _Turns(settings.large_bodies, settings.key_large_bodies)
        self._parsing = _Turns(NUM_PARSERS, 1)
        self._threads = ThreadPoolExecutor(NUM_PARSERS, thread_name_prefix="parse")

    @contextlib.contextmanager
    def request(self, owner: str) -> Iterator[None]:
        """Count a request of ``owner`` while it is served. Raises HttpProblem: 429 the owner has too many at once."""
        if self._requests[owner] >= self._most:
            detail = f"more than {self._most} requests of this key are in progress; wait for some of them"
            raise _refusal("too_many_at_once", detail)
        self._requests[owner] += 1
        try:
            yield
        finally:
            self._requests[owner] -= 1
            if not self._requests[owner]:
                del self._requests[owner]

    def large_body(self, owner: str) -> LargeBody:
        """Return a ``LargeBody``, which takes no slot until the request's body turns out to be large."""
        return LargeBody(self._large, owner)

    async def parse(self, owner: str, body: bytes, work: Callable[[], T]) -> T:
        """Return ``work()``, which parses ``body``; long bodies are parsed in a thread, one at a time for each owner.

        Raises:
            HttpProblem: 429 no thread was free for the owner within WAIT_S.
        """
        if len(body) <= IN_THREAD_BYTES:
            return work()
        async with self._parsing.turn(owner, "parsed"):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Shut the parser threads down."""
        self._threads.shutdown(wait=False)


class LargeBody:
    """Slot that a request holds while its large body is read and parsed."""

    def __init__(self, turns: _Turns, owner: str) -> None:
        self._turns, self._owner = turns, owner
        self._held = contextlib.AsyncExitStack()
        self._is_held = False

    async def enter(self) -> None:
        """Wait for a slot; later calls do nothing. Raises HttpProblem: 429 no slot was free within WAIT_S seconds."""
        if not self._is_held:
            self._is_held = True
            await self._held.enter_async_context(self._turns.turn(self._owner, "read"))

    async def leave(self) -> None:
        """Release the slot. Call this once the body is parsed or abandoned."""
        await self._held.aclose()


class _Turns:
    """Semaphore with ``most`` slots, of which one owner holds at most ``each``. An owner at its limit does not delay
    others."""

    def __init__(self, most: int, each: int) -> None:
        self._all, self._each = asyncio.Semaphore(most), each
        self._owners: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, what: str) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises HttpProblem: 429 no slot was free within WAIT_S seconds."""
        own, users = self._owners.get(owner) or (asyncio.Semaphore(self._each), 0)
        self._owners[owner] = own, users + 1
        try:
            async with contextlib.AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(WAIT_S):
                        await held.enter_async_context(own)
                        await held.enter_async_context(self._all)
                except TimeoutError:
                    detail = f"other large bodies were being {what} for {WAIT_S:g} s; send fewer at once"
                    raise _refusal("too_many_large_bodies", detail) from None
                yield
        finally:
            own, users = self._owners[owner]
            self._owners[owner] = own, users - 1
            if users == 1:
                del self._owners[owner]


def _refusal(code: str, detail: str) -> HttpProblem:
    return HttpProblem(429, code, detail, headers={"Retry-After": "1", "retry-after-ms": "1000"})
