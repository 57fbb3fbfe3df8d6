"""One job on one env worker: executes its tool calls, and holds the states of its episodes."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from typing import Any

from penstock.services.env.episodes import EpisodeStore, World
from penstock.services.env.tools.pool import ToolPool
from penstock.services.env.tools.template import ObjectTemplate
from penstock.services.env.verifiers import VerifiersHost
from penstock.shared.config.environment import EnvironmentConfig, VerifiersConfig
from penstock.shared.config.tools import MethodTool
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.runtime import metrics
from penstock.shared.runtime.tasks import end_tasks
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.serve import Server

__all__ = ["ToolSession"]

QUEUE = "env"
MAX_PROCESSES = 4
MAX_EPISODES = 256
"""Maximum number of episodes with state of one job on one env worker; each episode has a process."""
MAX_CONCURRENT = 256
"""Maximum number of calls that this session accepts at once; further calls wait on the bus."""
MAX_HELD = 4096
"""Maximum number of concurrent requests for episodes with state; it is high, as clients repeat requests in progress."""
CLOSE_S = 0.5
REMEMBER_S = 15.0
"""Seconds for which a reply is kept for a requester that did not receive it."""
DRAIN_CHECK_S = 0.05

CALL_SECONDS = metrics.histogram("env_tool_seconds", "Carrying out one call of a tool, waiting for a process included.")
CALLS = metrics.counter("env_tool_calls", "Calls of tools, and turns of environments.")
FAILED = metrics.counter("env_tool_calls_failed", "Calls whose tool broke, hung or could not be opened.")


class ToolSession:
    """Answers calls until drained or cancelled. A repeated call is executed once."""

    def __init__(self, bus: Bus, job: str, config: EnvironmentConfig | VerifiersConfig, *, drain_s: float) -> None:
        self._bus, self.job, self._drain_s = bus, job, drain_s
        cores = len(os.sched_getaffinity(0))
        self._pool: ToolPool | None = None
        self._world: World | None = None
        most = MAX_EPISODES
        if isinstance(config, VerifiersConfig):
            self._world, most, self._limit_s = VerifiersHost(config), config.max_episodes, config.step_timeout_s
        else:
            stateless = [tool for tool in config.tools if not isinstance(tool, MethodTool)]
            methods = [tool for tool in config.tools if isinstance(tool, MethodTool)]
            self._pool = ToolPool(stateless, max(1, min(MAX_PROCESSES, cores)))
            self._world = ObjectTemplate(methods) if methods else None
            self._limit_s = config.tool_timeout_s
            self._names = [tool.name for tool in config.tools]
        self._episodes = EpisodeStore(self._world, most=most, idle_s=config.idle_timeout_s) if self._world else None
        self._asked: dict[str, asyncio.Task[ToolReply]] = {}
        self._draining = asyncio.Event()
        self.ended = asyncio.Event()
        """Set by the owner when ``run`` has ended."""
        self._busy = 0
        self._counts = {"calls": 0, "errors": 0, "failed": 0}

    async def run(self) -> None:
        """Serve until drained or cancelled. While the tools cannot be opened, each call gets the error as its reply."""
        async with AsyncExitStack() as closing:
            if self._pool is not None:
                closing.push_async_callback(self._pool.close)
                await self._pool.start()
            if self._episodes is not None and self._world is not None:
                closing.push_async_callback(self._world.close)
                closing.push_async_callback(self._episodes.close)
                await self._world.start()
                idle = asyncio.create_task(self._episodes.give_up_idle())
                closing.callback(idle.cancel)
            closing.push_async_callback(self._end_calls)
            await self._serve()

    async def _serve(self) -> None:
        held: Server | None = None
        if self._episodes is not None:  # first, so that a client that learns of a holder can reach it
            held = await self._bus.serve(subjects.env(self._episodes.holder), self._on_request, max_concurrent=MAX_HELD)
        server = await self._bus.serve(
            subjects.tools(self.job), self._on_request, queue=QUEUE, max_concurrent=MAX_CONCURRENT
        )
        try:
            await self._draining.wait()
        finally:
            await server.close(self._drain_s if self._draining.is_set() else CLOSE_S)
            if held is not None:
                await self._let_episodes_end()
                await held.close(CLOSE_S)

    async def _let_episodes_end(self) -> None:
        """While draining, wait at most ``drain_s`` for held episodes, because they cannot move to another worker."""
        end = time.monotonic() + self._drain_s
        while self._draining.is_set() and self._episodes and time.monotonic() < end:
            await asyncio.sleep(DRAIN_CHECK_S)

    async def _end_calls(self) -> None:
        await end_tasks(list(self._asked.values()))

    def drain(self) -> None:
        """Accept no more calls and episodes; ``run`` ends once those in progress are done."""
        self._draining.set()

    async def _on_request(self, data: bytes) -> bytes:
        """Execute a call and return the reply. A repeated request gets the reply of the first request; if the first
        call could not begin, the repeated request executes the call."""
        request, envelope = unpack(data, ToolRequest)
        task = self._asked.get(envelope.id)
        if task is None:
            task = self._asked[envelope.id] = asyncio.create_task(self._call(envelope.id, request))
            task.add_done_callback(lambda done: self._remember(envelope.id, done, request))
        return pack(await asyncio.shield(task), job=self.job, id=envelope.id, trace=envelope.trace)

    def _remember(self, call: str, done: asyncio.Task[ToolReply], request: ToolRequest) -> None:
        """Keep the reply of a stateless call for REMEMBER_S seconds. Do not keep errors, nor replies of stateful calls:
        the episode stores those replies."""
        if request.state is not None or done.cancelled() or done.exception() is not None:
            self._asked.pop(call, None)
        else:
            asyncio.get_running_loop().call_later(REMEMBER_S, self._asked.pop, call, None)

    async def _call(self, id: str, request: ToolRequest) -> ToolReply:
        """Execute a call. Raises Unavailable if no process was free in time."""
        started = time.perf_counter()
        self._busy += 1
        try:
            reply = await self._carry_out(id, request)
        finally:
            self._busy -= 1
        CALL_SECONDS.observe(time.perf_counter() - started)
        CALLS.inc(1)
        FAILED.inc(reply.status == "failed")
        self._counts["calls"] += request.purpose not in ("keep", "end")
        self._counts["errors"] += reply.status == "error"
        self._counts["failed"] += reply.status == "failed"
        return reply

    async def _carry_out(self, id: str, request: ToolRequest) -> ToolReply:
        if request.state is not None and self._episodes is not None:
            return await self._episodes.ask(id, request, self._limit_s)
        if request.state is None and self._pool is not None:
            if request.name not in self._names:
                text = f"there is no tool '{request.name}'; there is: {', '.join(self._names)}"
                return ToolReply(status="error", text=text)
            return await self._pool.call(request, self._limit_s)
        raise ProtocolError(f"job {self.job}: its environment has no such request")

    def status(self) -> dict[str, Any]:
        """Return the job's entry in the heartbeat of this process."""
        row: dict[str, Any] = {**{f"tool_{name}": n for name, n in self._counts.items()}, "running": self._busy}
        if self._episodes is not None:
            row["tool_episodes"] = len(self._episodes)
        refused = (self._pool and self._pool.refused) or (self._world and self._world.refused)
        if refused:
            since, why = refused
            row |= {"waiting_for": why, "since": since, "subject": subjects.tools(self.job)}
        return row
