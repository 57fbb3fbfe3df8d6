"""Requests between two processes of one host through a Unix socket, for short requests whose latency matters.

A request is ``size, id`` and a body; a reply is ``size, id, length of a name``, the name of an error's class ('' for
none) and a body. Sizes are in bytes, of all that follows the header. The socket has an abstract address, which the
kernel removes with its process. Both ends accept only processes of their own user.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import cast

from penstock.shared.errors import Unavailable
from penstock.shared.transport.serve import error_of, error_reply

__all__ = ["UnixClient", "UnixServer"]

MAX_BYTES = 64 << 20
"""Limit of one message (bytes); a longer one ends the connection. Frames above 1 MiB are sent as claim checks."""

_REQUEST = struct.Struct("<II")
_REPLY = struct.Struct("<IIB")
_PEER = struct.Struct("3i")


class UnixServer:
    """Answers requests with a handler, each in its own task. Clients pass ``address`` to ``UnixClient.open``."""

    def __init__(self, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        self.address = f"penstock-{secrets.token_hex(16)}"
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[_Messages] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Accept connections. Raises OSError if the socket cannot be opened, for example without a free file
        descriptor."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(f"\0{self.address}")
            listening.listen(8)
            listening.setblocking(False)
            self._server = await asyncio.get_running_loop().create_unix_server(self._connected, sock=listening)
        except OSError:
            listening.close()
            raise

    async def close(self, deadline_s: float = 5.0) -> None:
        """Accept no more requests; give running requests ``deadline_s`` to finish, then cancel them. Safe to repeat."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=deadline_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)
        for connection in list(self._connections):
            connection.close()

    def _connected(self) -> _Messages:
        connection = _Messages(_REQUEST, self._on_request, self._connections.discard)
        self._connections.add(connection)
        return connection

    def _on_request(self, connection: _Messages, header: tuple[int, ...], body: bytes) -> None:
        if self._closing:  # the connection ends soon, and the client sees that
            return
        task = asyncio.create_task(self._answer(connection, header[1], body), name="serve a Unix socket")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, connection: _Messages, number: int, body: bytes) -> None:
        name = ""
        try:
            reply = await self._handler(body)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # this server ends; otherwise the handler cancelled itself
                raise
            name, reply = error_reply("a Unix socket", error)
        encoded = name.encode()
        connection.send(_REPLY.pack(len(encoded) + len(reply), number, len(encoded)) + encoded, reply)


class UnixClient:
    """One connection to a ``UnixServer``: ``open`` creates it, ``close`` ends it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._connection = _Messages(_REPLY, self._on_reply, self._on_end)

    @classmethod
    async def open(cls, address: str) -> UnixClient:
        """Connect to the ``UnixServer`` at ``address``.

        Raises:
            Unavailable: no process of this user serves the address in this network namespace.
        """
        client = cls()
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connecting.setblocking(False)
        try:
            connecting.connect(f"\0{address}")
            await asyncio.get_running_loop().create_unix_connection(lambda: client._connection, sock=connecting)
        except OSError as error:
            connecting.close()
            raise Unavailable(f"Unix socket '{address}': {error.strerror or error}") from None
        if not client.is_open:
            raise Unavailable(f"Unix socket '{address}' belongs to another user, or was closed at once")
        return client

    @property
    def is_open(self) -> bool:
        """False once the connection has ended."""
        return self._connection.is_open

    @property
    def peer(self) -> int:
        """Id of the process that serves the address. 0 if that process has no id here, because it runs in a PID
        namespace that is invisible to this process (another container)."""
        return self._connection.peer

    async def request(self, data: bytes, *, deadline_s: float) -> bytes:
        """Send a request and return the reply.

        Raises:
            Unavailable: the connection ended (then ``is_open`` is False), or no reply until the deadline. The request
                may have been executed.
            PenstockError: raised by the handler, with its class.
        """
        if not self.is_open:
            raise Unavailable("the Unix socket is closed")
        number = next(self._numbers) & 0xFFFFFFFF
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        timer = asyncio.get_running_loop().call_later(deadline_s, _fail, reply, f"no reply within {deadline_s:g} s")
        try:
            self._connection.send(_REQUEST.pack(len(data), number), data)
            return await reply
        finally:
            timer.cancel()
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the connection. Safe to repeat."""
        self._connection.close()

    def _on_reply(self, connection: _Messages, header: tuple[int, ...], body: bytes) -> None:
        _, number, length = header
        reply = self._waiting.get(number)
        if reply is None or reply.done():  # its requester gave up
            return
        if length:
            reply.set_exception(error_of(body[:length].decode(), body[length:]))
        else:
            reply.set_result(body)

    def _on_end(self, connection: _Messages) -> None:
        for reply in self._waiting.values():
            _fail(reply, "the Unix socket was closed")


class _Messages(asyncio.Protocol):
    """Splits the bytes of one connection into messages; the first number of a header is the size of the body."""

    def __init__(
        self,
        header: struct.Struct,
        on_message: Callable[[_Messages, tuple[int, ...], bytes], None],
        on_end: Callable[[_Messages], None],
    ) -> None:
        self._header, self._on_message, self._on_end = header, on_message, on_end
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self.peer = 0
        """Id of the process at the other end; 0 if it is outside of this process's PID namespace."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        connected: socket.socket = transport.get_extra_info("socket")
        self.peer, user, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if user != os.getuid():
            transport.abort()  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= self._header.size:
            header = self._header.unpack_from(received)
            if header[0] > MAX_BYTES:
                self.close()
                return
            end = self._header.size + header[0]
            if len(received) < end:
                return
            body = bytes(memoryview(received)[self._header.size : end])
            del received[:end]
            self._on_message(self, header, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end(self)

    def send(self, header: bytes, body: bytes) -> None:
        """Write a message; do nothing if the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(header + body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _fail(reply: asyncio.Future[bytes], why: str) -> None:
    if not reply.done():
        reply.set_exception(Unavailable(why))
