"""Requests through a Unix socket: replies find their requests, errors keep their class, and every wait ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from penstock.shared.errors import Conflict, PenstockError, Unavailable
from penstock.shared.transport import unix_socket
from penstock.shared.transport.unix_socket import UnixClient, UnixServer


@asynccontextmanager
async def connected(handler: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[tuple[UnixServer, UnixClient]]:
    server = UnixServer(handler)
    await server.start()
    client = await UnixClient.open(server.address)
    try:
        async with asyncio.timeout(30):
            yield server, client
    finally:
        client.close()
        await server.close(0.1)


async def echo(data: bytes) -> bytes:
    return data[::-1]


async def test_messages_of_all_sizes_arrive_whole() -> None:
    async with connected(echo) as (_, client):
        for size in (0, 1, 7, 4096, 1 << 20, 5_000_000):
            data = os.urandom(size)
            assert await client.request(data, deadline_s=20) == data[::-1]


async def test_each_request_gets_its_own_reply() -> None:
    """This holds if the server replies in another order, and if a requester has given up."""
    gates = {number: asyncio.Event() for number in range(4)}

    async def in_another_order(data: bytes) -> bytes:
        await gates[data[0]].wait()
        return data * 2

    async with connected(in_another_order) as (_, client):
        asked = [asyncio.create_task(client.request(bytes([n]), deadline_s=20)) for n in range(3)]
        with pytest.raises(Unavailable, match=r"no reply within 0\.01 s"):
            await client.request(bytes([3]), deadline_s=0.01)
        asked[1].cancel()
        for number in (3, 2, 1, 0):
            gates[number].set()
            await asyncio.sleep(0)
        assert await asked[0] == bytes([0, 0])
        assert await asked[2] == bytes([2, 2])
        assert asked[1].cancelled()
        assert client.is_open


async def test_errors_of_the_handler_keep_their_class() -> None:
    async def broken(data: bytes) -> bytes:
        raise Conflict("request 5 after request 1") if data == b"a" else RuntimeError("a defect")

    async with connected(broken) as (_, client):
        with pytest.raises(Conflict, match="request 5 after request 1"):
            await client.request(b"a", deadline_s=20)
        with pytest.raises(PenstockError, match="a defect"):
            await client.request(b"b", deadline_s=20)


async def test_the_end_of_a_server_is_seen_at_once() -> None:
    begun = asyncio.Event()

    async def never(_: bytes) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    async with connected(never) as (server, client):
        asked = asyncio.create_task(client.request(b"", deadline_s=1000))
        await begun.wait()
        await server.close(0.01)
        with pytest.raises(Unavailable, match="was closed"):
            await asked
        assert not client.is_open
        with pytest.raises(Unavailable, match="is closed"):
            await client.request(b"", deadline_s=1000)
        with pytest.raises(Unavailable, match="Connection refused"):
            await UnixClient.open(server.address)


async def test_processes_of_other_users_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(echo) as (server, _):
        user = os.getuid()
        monkeypatch.setattr(unix_socket.os, "getuid", lambda: user + 1)
        with pytest.raises(Unavailable, match="another user"):
            await UnixClient.open(server.address)
        reader, writer = await asyncio.open_unix_connection(f"\0{server.address}")  # checks nothing, and is cut off
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("pieces", [1, 3, 1000])
async def test_bytes_may_arrive_in_any_pieces(pieces: int) -> None:
    async with connected(echo) as (server, _):
        reader, writer = await asyncio.open_unix_connection(f"\0{server.address}")
        request = (3).to_bytes(4, "little") + (9).to_bytes(4, "little") + b"abc"
        data = request * 50
        for start in range(0, len(data), pieces):
            writer.write(data[start : start + pieces])
            await writer.drain()
        reply = (3).to_bytes(4, "little") + (9).to_bytes(4, "little") + b"\0" + b"cba"
        assert await reader.readexactly(len(reply) * 50) == reply * 50
        writer.close()


async def test_a_message_that_claims_to_be_huge_ends_the_connection() -> None:
    async with connected(echo) as (server, _):
        reader, writer = await asyncio.open_unix_connection(f"\0{server.address}")
        writer.write((unix_socket.MAX_BYTES + 1).to_bytes(4, "little") + bytes(4))
        assert await reader.read() == b""
        writer.close()
