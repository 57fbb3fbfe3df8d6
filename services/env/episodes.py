"""Holds the states of episodes in this process: the first request creates a state, and an idle state is dropped."""

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

__all__ = ["EpisodeStore", "Handle", "World"]

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.5
UNHEARD_S = 20.0
"""Seconds, in addition to twice the time limit of a request, for which a state is kept until the client confirms its
first reply. A client that missed this reply asks another env worker and never returns.
"""


class Handle(Protocol):
    """State of one episode."""

    async def ask(self, request: ToolRequest, limit_s: float) -> ToolReply:
        """Execute a request on the state. Raises ToolError if the state is lost."""
        ...

    async def close(self) -> None:
        """Release the state."""
        ...


class World(Protocol):
    """Factory of episode states."""

    refused: tuple[float, str] | None
    """Start (Unix seconds) and reason of the current failure to create states; None if there is none."""

    async def start(self) -> None:
        """Prepare the creation of states; store a failure in ``refused``."""
        ...

    async def begin(self, state: EpisodeState) -> Handle:
        """Create the initial state of an episode. It depends only on ``state.seed`` and on ``state.row``, the row of
        the data set that the prompt came from. Raises ToolError if the creation fails."""
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


@dataclass(slots=True, eq=False)
class _Held:
    """An episode whose state this process holds, and its newest reply.

    Attributes:
        number: number of answered requests.
        last_id: id of the newest answered request.
        last: reply to the newest answered request.
        gone: reason why the state was lost, which all later requests get as an error; '' while it exists.
        unheard_s: seconds for which the state waits for the client to confirm the first reply; None: confirmed.
    """

    handle: Handle | None = None
    number: int = 0
    last_id: str = ""
    last: ToolReply | None = None
    gone: str = ""
    unheard_s: float | None = None
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EpisodeStore:
    """Holds the states of at most ``most`` episodes, each for ``idle_s`` seconds after its last request."""

    def __init__(self, world: World, *, most: int, idle_s: float) -> None:
        self._world, self._most, self._idle_s = world, most, idle_s
        self._held: dict[str, _Held] = {}
        self.holder = secrets.token_hex(8)
        """Random id of this store, by which clients address it. A restarted process has other states, so another id."""

    def __len__(self) -> int:
        return len(self._held)

    async def ask(self, id: str, request: ToolRequest, limit_s: float) -> ToolReply:
        """Return the reply to one request; a repetition of the last request gets the stored reply.

        Raises:
            Unavailable: the limit of episodes is reached, or ``request.start_by`` has passed; nothing was executed.
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
            if self._held.get(state.episode) is not held:  # it was dropped while this request waited
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
                    if bus_time() > request.start_by:  # creating it took too long, and the requester has given up
                        await self._forget(request.state.episode)
                        raise _late(request.state)
                return await held.handle.ask(request, limit_s)
            except ToolError as error:
                held.gone = str(error)
                await self._close(held)
        return ToolReply(status="failed", text=held.gone, gone=True)

    async def give_up_idle(self) -> None:
        """Remove idle episodes, and then close their states, until cancelled. A state gets no request while it is being
        closed."""
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
        """Close all states concurrently. If they were closed one after another, a cancellation during one close would
        skip the rest."""
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
