"""Tool processes of one job: one per concurrent call, up to a maximum, each started on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from penstock.services.env.tools.process import ToolProcess
from penstock.shared.config.tools import ToolConfig
from penstock.shared.errors import ToolError, Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.tools import ToolReply, ToolRequest

__all__ = ["ToolPool"]

REOPEN_S = 5.0
"""Pause before another attempt to open tools that failed to open."""


class ToolPool:
    """Executes calls, each in a process that serves no other call meanwhile; kills processes that break or hang."""

    def __init__(self, tools: Sequence[ToolConfig], size: int) -> None:
        self._tools = tools
        self._idle: list[ToolProcess] = []
        """Idle processes. The one used last is used next, so that no more processes start than calls need."""
        self._slots = asyncio.Semaphore(size)
        self._tried = 0.0
        self.refused: tuple[float, str] | None = None
        """Start (Unix seconds) and reason of the current failure to open tools; None if there is none."""

    async def start(self) -> None:
        """Open the first process early, so that ``refused`` holds the error if the tools cannot be opened."""
        if not self._tools:
            return
        try:
            self._idle.append(await self._open())
        except ToolError:
            return

    async def call(self, request: ToolRequest, limit_s: float) -> ToolReply:
        """Execute a call. The reply is `failed` if tools cannot be opened, or the tool fails or exceeds ``limit_s``.

        Raises:
            Unavailable: ``request.start_by`` passed before a process was free; the call was not begun.
        """
        async with self._slots:
            process: ToolProcess | None = None
            usable = False
            try:
                self._check_time(request)
                process = self._idle.pop() if self._idle else await self._open()
                usable = True
                self._check_time(request)  # opening a process may take long
                usable = False
                reply = await process.call(request, limit_s)
                usable = True
            except ToolError as error:
                return ToolReply(status="failed", text=str(error))
            finally:
                if usable and process is not None:
                    self._idle.append(process)
                elif process is not None:
                    await process.kill()
            return reply

    @staticmethod
    def _check_time(request: ToolRequest) -> None:
        if bus_time() > request.start_by:
            raise Unavailable(f"no process was free in time for a call of tool '{request.name}'")

    async def close(self) -> None:
        """Kill all idle processes. A process with a running call is killed when that call is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while self._idle:
                tasks.create_task(self._idle.pop().kill())

    async def _open(self) -> ToolProcess:
        """Start a process. Raises ToolError if that fails, or failed less than ``REOPEN_S`` ago."""
        if self.refused is not None and time.monotonic() - self._tried < REOPEN_S:
            raise ToolError(self.refused[1])
        self._tried = time.monotonic()
        try:
            process = await ToolProcess.start(self._tools)
        except ToolError as error:
            self.refused = self.refused or (bus_time(), str(error))
            raise
        self.refused = None
        return process
