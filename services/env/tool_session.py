"""One job on one env worker: carries out the calls of its tools."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from penstock.services.env.tools.pool import ToolPool
from penstock.shared.config.environment import EnvironmentConfig
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.runtime import metrics
from penstock.shared.transport.bus import Bus

__all__ = ["ToolSession"]

QUEUE = "env"
MAX_PROCESSES = 4
MAX_CONCURRENT = 256
"""Calls that wait for a process here; more wait on the bus."""
CLOSE_S = 0.5
REMEMBER_S = 15.0
"""An answer is kept this long for a requester that did not get it."""

CALL_SECONDS = metrics.histogram("env_tool_seconds", "Carrying out one call of a tool, waiting for a process included.")
CALLS = metrics.counter("env_tool_calls", "Calls of tools.")
FAILED = metrics.counter("env_tool_calls_failed", "Calls whose tool broke, hung or could not be opened.")


class ToolSession:
    """Answers calls until drained or cancelled. A call that is asked for twice here is carried out once."""

    def __init__(self, bus: Bus, job: str, config: EnvironmentConfig, *, drain_s: float) -> None:
        self._bus, self.job, self._config, self._drain_s = bus, job, config, drain_s
        cores = len(os.sched_getaffinity(0))
        self._pool = ToolPool(config.tools, max(1, min(MAX_PROCESSES, cores)))
        self._asked: dict[str, asyncio.Task[ToolReply]] = {}
        self._draining = asyncio.Event()
        self.ended = asyncio.Event()
        """Set by the owner when ``run`` is over."""
        self._busy = 0
        self._counts = {"calls": 0, "errors": 0, "failed": 0}

    async def run(self) -> None:
        """Serve until drained or cancelled. Tools that cannot be opened are reported in every answer."""
        try:
            await self._pool.start()
            server = await self._bus.serve(
                subjects.tools(self.job), self._on_request, queue=QUEUE, max_concurrent=MAX_CONCURRENT
            )
            try:
                await self._draining.wait()
            finally:
                await server.close(self._drain_s if self._draining.is_set() else CLOSE_S)
        finally:
            tasks = list(self._asked.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._pool.close()

    def drain(self) -> None:
        """Take no more calls; ``run`` ends once those in hand are done."""
        self._draining.set()

    async def _on_request(self, data: bytes) -> bytes:
        """Carry a call out once: who asks again joins the first. One that was not begun in time may be asked again."""
        request, envelope = unpack(data, ToolRequest)
        task = self._asked.get(envelope.id)
        if task is None:
            task = self._asked[envelope.id] = asyncio.create_task(self._call(request))
            task.add_done_callback(lambda done: self._remember(envelope.id, done))
        return pack(await asyncio.shield(task), job=self.job, id=envelope.id, trace=envelope.trace)

    def _remember(self, call: str, done: asyncio.Task[ToolReply]) -> None:
        """Keep an answer for a while; there is none where the call was not begun."""
        if done.cancelled() or done.exception() is not None:
            self._asked.pop(call, None)
        else:
            asyncio.get_running_loop().call_later(REMEMBER_S, self._asked.pop, call, None)

    async def _call(self, request: ToolRequest) -> ToolReply:
        """Raises Unavailable where no process was free in time."""
        started = time.perf_counter()
        self._busy += 1
        try:
            reply = await self._pool.call(request, self._config.tool_timeout_s)
        finally:
            self._busy -= 1
        CALL_SECONDS.observe(time.perf_counter() - started)
        CALLS.inc(1)
        FAILED.inc(reply.status == "failed")
        self._counts["calls"] += 1
        self._counts["errors"] += reply.status == "error"
        self._counts["failed"] += reply.status == "failed"
        return reply

    def status(self) -> dict[str, Any]:
        """This process's entry for the job, for its heartbeat."""
        row: dict[str, Any] = {**{f"tool_{name}": n for name, n in self._counts.items()}, "running": self._busy}
        if self._pool.refused is not None:
            since, why = self._pool.refused
            row |= {"waiting_for": why, "since": since, "subject": subjects.tools(self.job)}
        return row
