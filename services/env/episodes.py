"""The states of episodes that this process holds: each made by its first request, used in order, given up when idle."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from penstock.shared.errors import ToolError, Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.tools import EpisodeState, ToolReply, ToolRequest
from penstock.shared.runtime.tasks import unexpected

__all__ = ["EpisodeBook", "Handle", "World"]

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.5
UNHEARD_S = 20.0
"""A state whose first answer nobody has heard is kept this much longer than twice the time for a request: who did not
hear it asks others then, and never comes back."""


class Handle(Protocol):
    """The state of one episode."""

    async def ask(self, request: ToolRequest, limit_s: float) -> ToolReply:
        """Go on with it. Raises ToolError where the state is gone."""
        ...

    async def close(self) -> None:
        """Give it up."""
        ...


class World(Protocol):
    """Where episodes take place."""

    refused: tuple[float, str] | None
    """Since when (Unix seconds) and why none can begin."""

    async def start(self) -> None:
        """Get ready; ``refused`` says why it could not."""
        ...

    async def begin(self, state: EpisodeState) -> Handle:
        """A new state, from seed and row alone. Raises ToolError where there can be none."""
        ...

    async def close(self) -> None:
        """Give everything up."""
        ...


@dataclass(slots=True, eq=False)
class _Held:
    """One episode. ``number`` requests were answered, the last of them ``last_id`` with ``last``.

    ``gone``: why its state is no more. Nothing takes its place: whatever follows has failed. ``unheard_s``: how long it
    is kept while nobody has said that the first answer arrived; None: somebody has.
    """

    handle: Handle | None = None
    number: int = 0
    last_id: str = ""
    last: ToolReply | None = None
    gone: str = ""
    unheard_s: float | None = None
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EpisodeBook:
    """Holds at most ``most`` episodes, each for ``idle_s`` after its last request."""

    def __init__(self, world: World, *, most: int, idle_s: float) -> None:
        self._world, self._most, self._idle_s = world, most, idle_s
        self._held: dict[str, _Held] = {}
        self.holder = secrets.token_hex(8)
        """Names this process for as long as it lives: another one, even in its place, has other states."""

    def __len__(self) -> int:
        return len(self._held)

    async def ask(self, id: str, request: ToolRequest, limit_s: float) -> ToolReply:
        """The answer to one request; the last one is answered from memory.

        Raises:
            Unavailable: there is no room for another episode, or ``request.start_by`` is over; nothing was begun.
        """
        state = request.state
        assert state is not None
        held = self._held.get(state.episode)
        if request.purpose == "keep":
            if held is not None:
                held.unheard_s = None
            return ToolReply(status="ok", text="")
        if held is None:
            if state.number or request.purpose == "end":
                return _lost(state)
            if len(self._held) >= self._most:
                raise Unavailable(f"this env worker has {self._most} episodes already")
            held = self._held[state.episode] = _Held(unheard_s=2 * limit_s + UNHEARD_S)
        async with held.lock:
            if self._held.get(state.episode) is not held:  # it was given up while this request waited
                if state.number == 0 and request.purpose != "end":
                    raise _late(state)
                return _lost(state)
            if request.purpose == "end":
                await self._forget(state.episode)
                return ToolReply(status="ok", text="")
            return await self._in_order(held, id, request, limit_s)

    async def _in_order(self, held: _Held, id: str, request: ToolRequest, limit_s: float) -> ToolReply:
        assert request.state is not None
        held.used = time.monotonic()
        if held.last is not None and held.last_id == id:
            return held.last
        if request.state.number != held.number:
            return _lost(request.state)
        if bus_time() > request.start_by:
            if not held.number:
                await self._forget(request.state.episode)
            raise _late(request.state)
        if held.number:
            held.unheard_s = None
        try:
            reply = await self._carry_out(held, request, limit_s)
        finally:
            held.used = time.monotonic()
        held.number, held.last_id, held.last = held.number + 1, id, replace(reply, holder=self.holder)
        return held.last

    async def _carry_out(self, held: _Held, request: ToolRequest, limit_s: float) -> ToolReply:
        assert request.state is not None
        if not held.gone:
            try:
                if held.handle is None:
                    held.handle = await self._world.begin(request.state)
                    if bus_time() > request.start_by:  # a machine may take long to have one, and nobody waits now
                        await self._forget(request.state.episode)
                        raise _late(request.state)
                return await held.handle.ask(request, limit_s)
            except ToolError as error:
                held.gone = str(error)
                await self._close(held)
        return ToolReply(status="failed", text=held.gone, gone=True)

    async def give_up_idle(self) -> None:
        """Close what nobody has used for long, until cancelled: at once, for none may be asked once it was chosen."""
        while True:
            await asyncio.sleep(min(IDLE_CHECK_S, self._idle_s))
            now = time.monotonic()
            idle = [episode for episode, held in self._held.items() if self._is_idle(held, now)]
            async with asyncio.TaskGroup() as tasks:
                for held in [self._held.pop(episode) for episode in idle]:
                    tasks.create_task(self._give_up(held))

    async def _give_up(self, held: _Held) -> None:
        if (error := await unexpected(self._close(held))) is not None:
            logger.error("the state of an idle episode was not closed in order: %s", error, exc_info=error)

    def _is_idle(self, held: _Held, now: float) -> bool:
        limit_s = self._idle_s if held.unheard_s is None else min(self._idle_s, held.unheard_s)
        return now - held.used > limit_s and not held.lock.locked()

    async def close(self) -> None:
        """Give up all states at once: closing one may take a while, and an end that is cancelled reaches every one."""
        async with asyncio.TaskGroup() as tasks:
            for episode in list(self._held):
                tasks.create_task(self._forget(episode))

    async def _forget(self, episode: str) -> None:
        held = self._held.pop(episode, None)
        if held is not None:
            await self._close(held)

    @staticmethod
    async def _close(held: _Held) -> None:
        if held.handle is not None:
            handle, held.handle = held.handle, None
            await handle.close()


def _late(state: EpisodeState) -> Unavailable:
    return Unavailable(f"it is too late to begin a request of episode '{state.episode}'")


def _lost(state: EpisodeState) -> ToolReply:
    return ToolReply(
        status="lost",
        text=f"the state of episode '{state.episode}' after {state.number} requests is not here: its env worker was "
        "started anew, or nobody used it for environment.idle_timeout_s",
    )
