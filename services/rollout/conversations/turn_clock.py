"""Time limit of one turn, which pauses while the turn waits for other services."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

__all__ = ["TurnClock"]


class TurnClock:
    """Async context manager for single use. Cancels its block and raises TimeoutError after ``limit_s`` seconds.

    Time within ``stopped`` does not count. ``limit_s`` None: no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._timeout = asyncio.timeout(limit_s)
        self._left_s = limit_s
        self._holders = 0

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Pause the clock during the block. Blocks may overlap."""
        self._holders += 1
        when = self._timeout.when()
        if self._holders == 1 and when is not None and not self._timeout.expired():
            self._left_s = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._holders -= 1
            if self._holders == 0 and self._left_s is not None and not self._timeout.expired():
                self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)
