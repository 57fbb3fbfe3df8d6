"""Sends the requests of episodes to env workers: to any worker, or to the worker that holds the episode's state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from msgspec.structs import replace

from penstock.services.rollout.conversations.turn_clock import TurnClock
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.connection import NoResponders

__all__ = ["EnvRequests"]

QUEUE_S = 5.0
"""Seconds within which an env worker must begin a call. A call not begun by then is not executed, and is sent again."""
MARGIN_S = 5.0
"""Seconds that a reply may take beyond the call's limits. Without a reply by then, the env worker counts as lost, and
the call is sent again."""
HOLDER_ASK_S = 2.0
"""Seconds without a reply after which a request to the env worker that holds a state is repeated; doubled each time.
The worker executes a repeated request once. If the worker's process is gone, the repeated request finds no responder.
"""
HOLDER_LOST_S = 10.0
"""Seconds without a subscriber after which the env worker that holds a state counts as lost; longer than a restart of
the broker takes."""
RETRY_S = 0.2
_WHAT = "an env worker"

Wait = Callable[[str, str, str], None]
"""Callback that reports a wait; arguments: the key of the ticket that waits, what it waits for, and the subject."""


class EnvRequests:
    """Sends the requests of one job's episodes to env workers.

    Args:
        limit_s: time limit of one request.
        wait: called when a ticket waits for an env worker.
        done: called with the key of a ticket when it no longer waits.
    """

    def __init__(self, bus: Bus, job: str, limit_s: float, wait: Wait, done: Callable[[str], None]) -> None:
        self._bus, self._job, self._limit_s, self._wait, self._done = bus, job, limit_s, wait, done

    async def ask(self, key: str, clock: TurnClock, name: str, request: ToolRequest) -> ToolReply:
        """Send a request to an env worker; return its reply. An error becomes a failed reply, so that no output of the
        policy can end the session.

        Once an attempt finds no worker that responds, the clock is paused until the reply arrives.

        Args:
            key: key of the ticket, under which a wait is reported.
            name: id of the request; a worker executes requests with the same id only once.
        """
        holder = request.state.holder if request.state else ""
        try:
            if request.purpose == "end":
                await self._bus.notify(subjects.env(holder), pack(request, job=self._job, id=name))
                return ToolReply(status="ok", text="")
            with ExitStack() as stopped:
                asked = self._ask_holder if holder else self._ask_any
                reply = await asked(key, name, request, lambda: stopped.enter_context(clock.stopped()))
            if reply.holder and not holder:
                await self._keep(name, request, reply.holder)
            return reply
        except PenstockError as error:
            return ToolReply(status="failed", text=f"the call could not be answered: {error}")
        finally:
            self._done(key)

    async def _keep(self, name: str, request: ToolRequest, holder: str) -> None:
        """Notify the env worker ``holder`` that its first reply arrived; else the worker drops the state early."""
        with suppress(Unavailable):  # then this state is dropped as well, and the episode restarts
            kept = ToolRequest(purpose="keep", state=request.state)
            await self._bus.notify(subjects.env(holder), pack(kept, job=self._job, id=f"{name}#keep"))

    async def _ask_any(self, key: str, name: str, request: ToolRequest, stop: Callable[[], None]) -> ToolReply:
        stopped = False
        while True:
            try:
                return await self._attempt(subjects.tools(self._job), name, request, QUEUE_S + self._limit_s + MARGIN_S)
            except Unavailable:
                self._wait(key, _WHAT, subjects.tools(self._job))
            if not stopped:
                stop()
                stopped = True
            await asyncio.sleep(RETRY_S)

    async def _ask_holder(self, key: str, name: str, request: ToolRequest, stop: Callable[[], None]) -> ToolReply:
        assert request.state is not None
        subject, patience_s = subjects.env(request.state.holder), HOLDER_ASK_S
        missed: float | None = None
        while True:
            try:
                return await self._attempt(subject, name, request, patience_s)
            except NoResponders:
                self._wait(key, _WHAT, subject)
                if missed is None:
                    missed = time.monotonic()
                    stop()
                elif time.monotonic() - missed > HOLDER_LOST_S:
                    return ToolReply(status="lost", text="the env worker that held the episode is gone")
            except Unavailable:  # it is busy, or has not begun in time
                missed, patience_s = None, 2 * patience_s
            await asyncio.sleep(RETRY_S)

    async def _attempt(self, subject: str, name: str, request: ToolRequest, deadline_s: float) -> ToolReply:
        timed = replace(request, start_by=bus_time() + QUEUE_S)
        data = await self._bus.request(subject, pack(timed, job=self._job, id=name), deadline_s=deadline_s)
        return unpack(data, ToolReply)[0]
