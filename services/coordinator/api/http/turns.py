"""Fair scheduling on the event loop: a burst of tasks is spread over several iterations."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turns"]


class Turns:
    """Limiter that lets at most ``most`` tasks proceed per loop iteration, so that bursts do not delay other tasks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return in this loop iteration if fewer than ``most`` tasks have proceeded in it, else in a later
        iteration."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next)
        if self._begun < self._most and not self._waiting:
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._most:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
