"""Client of the env worker that holds the state of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from penstock.services.rollout.conversations.turn_clock import TurnClock
from penstock.services.rollout.trajectory import Episode
from penstock.shared.protocol.tools import EpisodeState, ToolReply, ToolRequest
from penstock.shared.runtime import metrics

__all__ = ["Ask", "StateKeeper", "StateLostError", "with_state"]

RESTARTED = metrics.counter("rollout_episodes_restarted", "Episodes begun again because their env worker was lost.")

Ask = Callable[[TurnClock, str, ToolRequest], Awaitable[ToolReply]]
"""Function (clock, request id, request) that sends a request to env workers and returns the reply; it pauses the clock
once no worker responds."""


class StateLostError(Exception):
    """Raised if the env worker that held the state of an episode is lost or has dropped the state."""


class StateKeeper:
    """Numbers the requests of one episode and sends them to the env worker that holds its state."""

    def __init__(self, episode: str, seed: int, row: dict[str, Any], ask: Ask) -> None:
        self.episode = episode
        self._seed, self._row, self._ask = seed, row, ask
        self._number, self._holder = 0, ""
        self._turn = asyncio.Lock()

    async def ask(self, clock: TurnClock, request: ToolRequest) -> ToolReply:
        """Send a request and return its reply. Concurrent requests are executed in call order.

        Raises:
            StateLostError: the state is lost.
        """
        async with self._turn:
            state = EpisodeState(
                episode=self.episode, seed=self._seed, number=self._number, row={} if self._number else self._row,
                holder=self._holder,
            )  # fmt: skip
            reply = await self._ask(clock, f"{self.episode}#{self._number}", replace(request, state=state))
            if reply.holder:
                self._number, self._holder = self._number + 1, reply.holder
            if reply.status == "lost":
                raise StateLostError(reply.text)
            return reply

    async def end(self) -> None:
        """Release the state. Safe to repeat."""
        if self._holder:
            state = EpisodeState(episode=self.episode, seed=self._seed, number=self._number, holder=self._holder)
            self._holder = ""
            await self._ask(TurnClock(None), f"{self.episode}#end", ToolRequest(purpose="end", state=state))


async def with_state(
    name: str,
    *,
    seed: int,
    row: dict[str, Any],
    ask: Ask,
    restarts: int,
    play: Callable[[StateKeeper], Awaitable[Episode]],
) -> Episode:
    """Play an episode whose state an env worker holds. If the state is lost, restart from the first turn.

    ``play`` plays an episode once. After ``restarts`` restarts, return a failed episode.
    """
    attempt = 0
    while True:
        keeper = StateKeeper(f"{name}+{attempt}" if attempt else name, seed, row, ask)
        try:
            return await play(keeper)
        except StateLostError as error:
            if attempt == restarts:
                episode = Episode()
                episode.fail(f"{error} (environment.restarts: {restarts})")
                return episode
            RESTARTED.inc(1)
            attempt += 1
        finally:
            await keeper.end()
