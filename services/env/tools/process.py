"""Handle of the env service for one tool process: start, call, wait with a limit, kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.services.env.tools.channel import LENGTH, encode
from penstock.shared.config.tools import ToolConfig
from penstock.shared.errors import ToolError
from penstock.shared.protocol.tools import ToolReply, ToolRequest
from penstock.shared.runtime.user_process import kill_group, start_with_channel

__all__ = ["OPEN_LIMIT_S", "ToolProcess", "tools_command"]

OPEN_LIMIT_S = 60.0
_BROKEN = (OSError, ValueError, RecursionError, msgspec.MsgspecError)
"""Errors by which a tool process fails: no more processes or memory, a broken pipe, or an invalid reply."""


class ToolProcess:
    """One running tool process. Used for one call at a time."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: Callable[[], Awaitable[None]]
    ) -> None:
        """Wrap a running process; ``end`` kills it with all its children. Use ``start`` to create one."""
        self._reader, self._writer, self._end = reader, writer, end

    @classmethod
    async def start(cls, tools: Sequence[ToolConfig]) -> ToolProcess:
        """Start a ``worker.py`` and open the tools in it.

        Raises:
            ToolError: a tool cannot be opened, or no process started; the text gives the reason.
        """
        try:
            return await cls._start(tools)
        except _BROKEN as error:
            raise ToolError(f"a process for tools cannot be started: {error!r}") from None

    @classmethod
    async def _start(cls, tools: Sequence[ToolConfig]) -> ToolProcess:
        process, channel = await start_with_channel(tools_command("penstock.services.env.tools.worker", tools))
        self = await cls.over(channel, partial(kill_group, process))
        opened = False
        try:
            error = (await self._receive(OPEN_LIMIT_S, "opening the tools"))["error"]
            if error:
                raise ToolError(error)
            opened = True
        finally:
            if not opened:
                await self.kill()
        return self

    @classmethod
    async def over(cls, channel: socket.socket, end: Callable[[], Awaitable[None]]) -> ToolProcess:
        """Wrap a process that listens at the other end of ``channel``."""
        channel.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=channel)
        return cls(reader, writer, end)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message that has no reply."""
        self._writer.write(encode(message))

    async def call(self, request: ToolRequest, limit_s: float) -> ToolReply:
        """Execute one call. Raises ToolError as ``ask`` does."""
        message = {"name": request.name, "arguments": request.arguments}
        return await self.ask(message, f"tool '{request.name}'", limit_s)

    async def ask(self, message: dict[str, Any], what: str, limit_s: float) -> ToolReply:
        """Send one message and return its reply.

        Raises:
            ToolError: ``limit_s`` was exceeded, the process died or its reply is invalid. Next, call ``kill``.
        """
        try:
            self.send(message)
            return msgspec.convert(await self._receive(limit_s, what), ToolReply)
        except _BROKEN as error:
            raise ToolError(f"{what} broke: {error!r}") from None

    async def kill(self) -> None:
        """Send SIGKILL to the process and all its children; wait for its end and close its channel."""
        self._writer.transport.abort()
        await self._end()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

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


def tools_command(module: str, tools: Sequence[ToolConfig]) -> Callable[[str], Sequence[str]]:
    """Return ``python -m MODULE FD PARENT TOOLS`` as a function of FD."""
    configs = json.dumps([tool.model_dump(mode="json") for tool in tools])
    return lambda fd: (sys.executable, "-m", module, fd, str(os.getpid()), configs)
