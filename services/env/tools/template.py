"""Handle of the env service for ``forks.py``, which forks a child with the state of each episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial

from penstock.services.env.tools.process import OPEN_LIMIT_S, ToolProcess, tools_command
from penstock.shared.config.tools import MethodTool
from penstock.shared.errors import ToolError
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.tools import EpisodeState, ToolReply, ToolRequest
from penstock.shared.runtime.user_process import kill_group, start_with_channel

__all__ = ["ObjectTemplate"]

REOPEN_S = 5.0
"""Pause before another attempt to open tools that failed to open."""
FORK_LIMIT_S = 10.0
CLOSE_LIMIT_S = 2.0
_MAX_WORDS = 4096


class ObjectTemplate:
    """Creates episodes of one job. If the forking process dies, its episodes are lost; the next episode starts a new
    process."""

    def __init__(self, tools: Sequence[MethodTool]) -> None:
        self._tools = tools
        self._running: _Forker | None = None
        self._lock = asyncio.Lock()
        self._tried = 0.0
        self.refused: tuple[float, str] | None = None
        """Start (Unix seconds) and reason of the current failure to open tools; None if there is none."""

    async def start(self) -> None:
        """Open the tools early, so that ``refused`` holds the error if they cannot be opened."""
        async with self._lock:
            with contextlib.suppress(ToolError):
                await self._open()

    async def begin(self, state: EpisodeState) -> EpisodeObjects:
        """Create the objects of an episode in their own process. Raises ToolError if that fails."""
        async with self._lock:
            forker = await self._open()
            try:
                process = await forker.fork()
            except ToolError:
                if not forker.alive:
                    self._running = None
                    await forker.close()
                raise
        process.send({"seed": state.seed, "row": state.row})
        return EpisodeObjects(process, forker)

    async def close(self) -> None:
        """Kill all processes."""
        async with self._lock:
            if self._running is not None:
                forker, self._running = self._running, None
                await forker.close()

    async def _open(self) -> _Forker:
        if self._running is not None and self._running.alive:
            return self._running
        if self._running is not None:
            forker, self._running = self._running, None
            await forker.close()
        if self.refused is not None and time.monotonic() - self._tried < REOPEN_S:
            raise ToolError(self.refused[1])
        self._tried = time.monotonic()
        try:
            self._running = await _Forker.start(self._tools)
        except ToolError as error:
            self.refused = self.refused or (bus_time(), str(error))
            raise
        self.refused = None
        return self._running


class EpisodeObjects:
    """Handle of the process that holds the objects of one episode's stateful tools."""

    def __init__(self, process: ToolProcess, forker: _Forker) -> None:
        self._process, self._forker, self._broken = process, forker, False

    async def ask(self, request: ToolRequest, limit_s: float) -> ToolReply:
        """Execute a call, or compute the reward. The reply is ``lost`` if that fails and the forking process has died.

        Raises:
            ToolError: the limit was exceeded or the process died; the state is lost.
        """
        try:
            if request.purpose == "reward":
                return await self._process.ask({"answer": request.arguments["answer"]}, "the reward", limit_s)
            return await self._process.call(request, limit_s)
        except ToolError as error:
            self._broken = True
            if not self._forker.alive:
                return ToolReply(status="lost", text=f"{error}: all episodes here are gone")
            raise

    async def close(self) -> None:
        """Let the objects close if they still can, then kill the process, also on cancellation."""
        try:
            if not self._broken:
                with contextlib.suppress(ToolError):
                    await self._process.ask({"close": True}, "closing", CLOSE_LIMIT_S)
        finally:
            await self._process.kill()


class _Forker:
    """One running ``forks.py``. Used for one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control
        self._children: set[int] = set()
        self._broken = False

    @property
    def alive(self) -> bool:
        """True if the process can serve requests. Becomes False when the process dies, before its children are
        killed."""
        return not self._broken and self._is_running()

    def _is_running(self) -> bool:
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    @classmethod
    async def start(cls, tools: Sequence[MethodTool]) -> _Forker:
        """Start the process. Raises ToolError if the tools cannot be opened."""
        command = tools_command("penstock.services.env.tools.forks", tools)
        try:
            process, control = await start_with_channel(command, kind=socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ToolError(f"a process for tools cannot be started: {error!r}") from None
        self = cls(process, control)
        opened = False
        try:
            problem = json.loads(await self._receive(OPEN_LIMIT_S, "opening the tools"))["error"]
            if problem:
                raise ToolError(problem)
            opened = True
        finally:
            if not opened:
                await self.close()
        return self

    async def fork(self) -> ToolProcess:
        """Fork a child. Raises ToolError on failure. If the cause is the death of the forking process, ``alive`` is
        already False when the error is raised."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            try:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            except OSError as error:
                raise ToolError(f"the process of the tools is gone: {error!r}") from None
            try:
                answer = (await self._receive(FORK_LIMIT_S, "a process for an episode")).decode()
            except (ToolError, asyncio.CancelledError):
                self._broken = True  # a late reply would be taken for that of another episode
                raise
            if not answer.isdecimal():
                raise ToolError(f"a process for an episode: {answer}")
            pid = int(answer)
            self._children.add(pid)
            undo.pop_all()
        return await ToolProcess.over(ours, partial(self._end, pid))

    async def _end(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # it has died, and so have its children
            self._control.send(f"end {pid}".encode())
            self._children.discard(pid)

    async def close(self) -> None:
        """Kill the process with its children and all processes that they started."""
        self._broken = True
        if self._is_running():  # it has reaped no other child, so these ids are still theirs
            for pid in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(OSError, TimeoutError):  # before it exits, it ends the children as requested
            self._control.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._process.wait()
        self._control.close()
        await kill_group(self._process)

    async def _receive(self, limit_s: float, what: str) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                data = await asyncio.get_running_loop().sock_recv(self._control, _MAX_WORDS)
        except TimeoutError:
            raise ToolError(f"{what} took longer than {limit_s:g} s") from None
        except OSError as error:
            raise ToolError(f"{what}: the process is gone: {error!r}") from None
        if not data:
            raise ToolError(f"{what}: the process died")
        return data
