"""Turns of the event loop: work that many clients cause at once is spread over several of them."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turns"]


class Turns:
    """Lets at most ``most`` tasks go on in one turn of the loop, so that a burst of them never holds up the others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Return when the task may go on."""
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
