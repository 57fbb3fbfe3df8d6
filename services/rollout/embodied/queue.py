"""Queue of episodes for lanes, shared by the sessions of a job. Pure except for the events that wake sessions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from penstock.services.rollout.embodied.episodes import Episode

__all__ = ["EpisodeQueue"]


class EpisodeQueue:
    """First-come, first-served queue that divides episodes evenly over the open sessions."""

    def __init__(self, num_sessions: int) -> None:
        self._waiting: deque[Episode] = deque()
        self._running: list[int | None] = [None] * num_sessions
        """Number of episodes in each session; None: not open."""
        self._changed = [asyncio.Event() for _ in range(num_sessions)]

    def add(self, episodes: Iterable[Episode]) -> None:
        """Queue episodes."""
        self._waiting.extend(episodes)
        self._wake()

    def report(self, session: int, running: int | None) -> None:
        """Record that ``running`` episodes are in progress in a session. ``running`` is None if the session is not
        open."""
        if (before := self._running[session]) != running:
            self._running[session] = running
            if before is None or running is None:
                self._wake()

    def take(self, session: int, free: int) -> list[Episode]:
        """Take up to ``free`` episodes for a session and return them; leave other open sessions an equal share."""
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
        """Wait until episodes may be available for a session. Return False after ``limit_s``."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._changed[session].wait()
        except TimeoutError:
            return False

    def _wake(self) -> None:
        for changed in self._changed:
            changed.set()
