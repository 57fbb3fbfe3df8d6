"""The time of one turn, which stands still while the turn waits for others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

__all__ = ["TurnClock"]


class TurnClock:
    """Used with ``async with``, once. The block is cancelled, and TimeoutError raised, after ``limit_s`` seconds that
    were not ``stopped``; None: never."""

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
        """Time in here does not count. Several may be in here at once."""
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
