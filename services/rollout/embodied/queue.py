"""Episodes that wait for a lane, and which session takes them. Pure but for the event that wakes a session."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from penstock.services.rollout.embodied.episodes import Episode

__all__ = ["EpisodeQueue"]


class EpisodeQueue:
    """First come, first served; sessions that are open share what there is evenly."""

    def __init__(self, num_sessions: int) -> None:
        self._waiting: deque[Episode] = deque()
        self._running: list[int | None] = [None] * num_sessions
        """Episodes of each session; None: it is not open."""
        self._changed = [asyncio.Event() for _ in range(num_sessions)]

    def add(self, episodes: Iterable[Episode]) -> None:
        """Have these played."""
        self._waiting.extend(episodes)
        self._wake()

    def tell(self, session: int, running: int | None) -> None:
        """A session has so many episodes; None: it is not open."""
        if (before := self._running[session]) != running:
            self._running[session] = running
            if before is None or running is None:
                self._wake()

    def take(self, session: int, free: int) -> list[Episode]:
        """Episodes for the free lanes of a session: not those that another open one is to take."""
        self._changed[session].clear()
        while self._waiting and self._waiting[0].unwanted:
            self._waiting.popleft()
        running = [number for number in self._running if number is not None]
        total = len(self._waiting) + sum(running)
        share = -(-total // max(1, len(running)))
        count = min(free, max(0, share - (self._running[session] or 0)))
        taken: list[Episode] = []
        while self._waiting and len(taken) < count:
            episode = self._waiting.popleft()
            if not episode.unwanted:
                taken.append(episode)
        return taken

    async def wait(self, session: int, limit_s: float) -> bool:
        """Wait until there may be something for a session, at most so long; False where there is not."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._changed[session].wait()
        except TimeoutError:
            return False

    def _wake(self) -> None:
        for changed in self._changed:
            changed.set()
