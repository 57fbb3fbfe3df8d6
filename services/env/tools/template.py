"""The service's handle of ``forks.py``: a child with the state of each episode, made in a moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Sequence
from functools import partial

from penstock.services.env.tools.process import OPEN_LIMIT_S, ToolProcess, kill_group, start_module
from penstock.shared.config.tools import MethodTool
from penstock.shared.errors import ToolError
from penstock.shared.protocol.tools import EpisodeState, ToolReply, ToolRequest

__all__ = ["ObjectTemplate"]

REOPEN_S = 5.0
"""Tools that did not open are not tried again for this long."""
FORK_LIMIT_S = 10.0
CLOSE_LIMIT_S = 2.0
_MAX_WORDS = 4096


class ObjectTemplate:
    """Begins episodes of one job. A process that died is started again by the next episode; those it had are lost."""

    def __init__(self, tools: Sequence[MethodTool]) -> None:
        self._tools = tools
        self._running: _Forker | None = None
        self._lock = asyncio.Lock()
        self._tried = 0.0
        self.refused: tuple[float, str] | None = None
        """Since when (Unix seconds) and why tools do not open."""

    async def start(self) -> None:
        """Open the tools, so that one that cannot be opened is known early; ``refused`` says so."""
        async with self._lock:
            with contextlib.suppress(ToolError):
                await self._open()

    async def begin(self, state: EpisodeState) -> EpisodeObjects:
        """The objects of an episode, in a process of their own. Raises ToolError where they cannot be had."""
        async with self._lock:
            forker = await self._open()
            try:
                process = await forker.fork()
            except ToolError:
                self._running = None
                await forker.close()
                raise
        process.tell({"seed": state.seed, "row": state.row})
        return EpisodeObjects(process)

    async def close(self) -> None:
        """Kill everything."""
        async with self._lock:
            if self._running is not None:
                forker, self._running = self._running, None
                await forker.close()

    async def _open(self) -> _Forker:
        if self._running is not None:
            return self._running
        if self.refused is not None and time.monotonic() - self._tried < REOPEN_S:
            raise ToolError(self.refused[1])
        self._tried = time.monotonic()
        try:
            self._running = await _Forker.start(self._tools)
        except ToolError as error:
            self.refused = self.refused or (time.time(), str(error))
            raise
        self.refused = None
        return self._running


class EpisodeObjects:
    """The objects of one episode."""

    def __init__(self, process: ToolProcess) -> None:
        self._process, self._broken = process, False

    async def ask(self, request: ToolRequest, limit_s: float) -> ToolReply:
        """Carry out a call, or have the episode judged.

        Raises:
            ToolError: it took too long, or the process died: the state is gone.
        """
        try:
            if request.purpose == "reward":
                return await self._process.ask({"answer": request.arguments["answer"]}, "the reward", limit_s)
            return await self._process.call(request, limit_s)
        except ToolError:
            self._broken = True
            raise

    async def close(self) -> None:
        """Let the objects close, where they still can, and kill the process."""
        if not self._broken:
            with contextlib.suppress(ToolError):
                await self._process.ask({"close": True}, "closing", CLOSE_LIMIT_S)
        await self._process.kill()


class _Forker:
    """One running ``forks.py``; one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control

    @classmethod
    async def start(cls, tools: Sequence[MethodTool]) -> _Forker:
        """Raises ToolError where the tools do not open."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            try:
                process = await start_module("penstock.services.env.tools.forks", theirs, tools)
            except OSError as error:
                raise ToolError(f"a process for tools cannot be started: {error!r}") from None
            undo.pop_all()
        self = cls(process, ours)
        opened = False
        try:
            problem = json.loads(await self._hear(OPEN_LIMIT_S, "opening the tools"))["error"]
            if problem:
                raise ToolError(problem)
            opened = True
        finally:
            if not opened:
                await self.close()
        return self

    async def fork(self) -> ToolProcess:
        """Raises ToolError where the process is gone."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            try:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            except OSError as error:
                raise ToolError(f"the process of the tools is gone: {error!r}") from None
            pid = int(await self._hear(FORK_LIMIT_S, "a process for an episode"))
            undo.pop_all()
        return await ToolProcess.over(ours, partial(self._end, pid))

    async def _end(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # it is gone, and so are its children
            self._control.send(f"end {pid}".encode())

    async def close(self) -> None:
        """Kill it; its children die with it."""
        self._control.close()
        await kill_group(self._process)

    async def _hear(self, limit_s: float, what: str) -> bytes:
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
