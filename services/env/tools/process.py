"""The service's handle of one tool process: start, call, wait with a limit, kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.services.env.tools.channel import LENGTH, encode
from penstock.shared.config.environment import ToolConfig
from penstock.shared.errors import ToolError
from penstock.shared.protocol.tools import ToolReply, ToolRequest

__all__ = ["ToolProcess"]

_OPEN_LIMIT_S = 60.0
_EXIT_LIMIT_S = 5.0
_BROKEN = (OSError, ValueError, RecursionError, msgspec.MsgspecError)
"""A machine without processes or memory to give, a pipe that is gone, an answer that is none."""


class ToolProcess:
    """One running ``worker.py``. Not shared: one call at a time."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Use ``start``."""
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, tools: Sequence[ToolConfig]) -> ToolProcess:
        """Start a process and open the tools in it.

        Raises:
            ToolError: a tool cannot be opened, or no process started; says why.
        """
        try:
            return await cls._start(tools)
        except _BROKEN as error:
            raise ToolError(f"a process for tools cannot be started: {error!r}") from None

    @classmethod
    async def _start(cls, tools: Sequence[ToolConfig]) -> ToolProcess:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            configs = json.dumps([tool.model_dump(mode="json") for tool in tools])
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "penstock.services.env.tools.worker", str(theirs.fileno()), str(os.getpid()), configs),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # prints of user code belong to the log
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that killing it also kills what user code started
            )
            undo.pop_all()
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        self = cls(process, reader, writer)
        opened = False
        try:
            error = (await self._receive(_OPEN_LIMIT_S, "opening the tools"))["error"]
            if error:
                raise ToolError(error)
            opened = True
        finally:
            if not opened:
                await self.kill()
        return self

    async def call(self, request: ToolRequest, limit_s: float) -> ToolReply:
        """Carry out one call.

        Raises:
            ToolError: it took longer than ``limit_s``, the process died or answered nonsense. Only ``kill`` may follow.
        """
        try:
            self._writer.write(encode({"name": request.name, "arguments": request.arguments}))
            return msgspec.convert(await self._receive(limit_s, f"tool '{request.name}'"), ToolReply)
        except _BROKEN as error:
            raise ToolError(f"tool '{request.name}' broke: {error!r}") from None

    async def kill(self) -> None:
        """SIGKILL the process and everything it started; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):  # it died a moment ago and left nobody behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_LIMIT_S):
                await self._process.wait()

    async def _receive(self, limit_s: float, what: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(limit_s):
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                message: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        except TimeoutError:
            raise ToolError(f"{what} took longer than {limit_s:g} s and was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ToolError(f"the process of {what} died") from None
        return message
