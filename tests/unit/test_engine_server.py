"""The client of an engine's HTTP server, and the child process that it starts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.rollout.engines.servers.client import EngineServer
from penstock.shared.errors import Unavailable, WeightsError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
PROGRAM = """
import http.server, os, socketserver, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def address_string(self): return "socket"
    def do_GET(self):
        found = os.environ.get("PENSTOCK_SECRET"), os.environ.get("MORE")
        body = ('{"penstock": "%s", "more": "%s"}' % found).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
assert sys.argv[1] == "--uds", sys.argv
socketserver.UnixStreamServer(sys.argv[2], Answer).serve_forever()
"""


def answer(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


@asynccontextmanager
async def serving(path: Path, handler: Handler) -> AsyncIterator[EngineServer]:
    """Start a server on a Unix socket; yield a client of it."""
    async with await asyncio.start_unix_server(handler, path):
        server = EngineServer("Engine", "http://server", socket_path=path)
        yield server
        await server.close()


async def test_a_url_that_leads_elsewhere_is_named() -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer("200 OK", "<p>x"))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(page, "127.0.0.1", 0) as elsewhere:
        server = EngineServer("SGLang", f"http://127.0.0.1:{elsewhere.sockets[0].getsockname()[1]}")
        with pytest.raises(Unavailable, match=r"/model_info answers with no JSON object: is that a server of SGLang\?"):
            await server.get("/model_info", "say what it serves")
        await server.close()


async def test_a_connection_that_the_server_gives_up_fails_no_later_call(tmp_path: Path) -> None:
    """After an error uvicorn answers with 500, and at the next request closes the connection instead of answering."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(answer("500 Error", '{"error": {"message": "half loaded"}}'))
        await writer.drain()
        await reader.read(1 << 16)
        writer.close()

    async with serving(tmp_path / "s", once) as server:
        for _ in range(2):
            with pytest.raises(WeightsError, match=r"Engine could not load weights: half loaded \(HTTP 500\)"):
                await server.post("/update_weights", {}, "load weights", WeightsError)


async def test_a_reply_without_success_is_an_error_despite_status_200(tmp_path: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer("200 OK", '{"success": false}'))
        await writer.drain()
        writer.close()

    async with serving(tmp_path / "s", refuse) as server:
        with pytest.raises(WeightsError, match="could not drop its caches"):
            await server.post("/reset_prefix_cache", {}, "drop its caches", WeightsError)


async def test_a_truncated_stream_counts_as_a_lost_server(tmp_path: Path) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {"a": 1}\n\n')
        await writer.drain()
        writer.close()

    async with serving(tmp_path / "s", cut) as server:
        received: list[Any] = []
        with pytest.raises(Unavailable, match="before its end"):
            async for event in server.events("/generate", {}):
                received.append(event)
        assert received == [{"a": 1}]


async def test_a_child_listens_on_a_socket_and_gets_no_variables_of_penstock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "key")
    socket_path = tmp_path / "s"
    server = await EngineServer.start(
        "Engine", Path(sys.executable), ["-c", PROGRAM], {"MORE": "here"}, socket_path=socket_path
    )
    assert await server.ready("/version") == {"penstock": "None", "more": "here"}
    assert (server.is_own, server.is_gone) == (True, False)
    (child,) = (each for each in psutil.Process().children() if str(socket_path) in each.cmdline())
    await server.close()
    assert server.is_gone
    assert not child.is_running()
    with pytest.raises(Unavailable, match="Engine"):
        await EngineServer("Engine", "http://server", socket_path=socket_path).get("/version", "say what it is")


async def test_a_child_that_ends_at_once_is_reported_with_its_status() -> None:
    server = await EngineServer.start("Engine", Path(sys.executable), ["-c", "raise SystemExit(3)"], {})
    with pytest.raises(Unavailable, match="Engine does not start: it ended with status 3"):
        await server.ready("/version")
    await server.close()


async def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"Engine's interpreter '.*/python' does not start: No such file"):
        await EngineServer.start("Engine", tmp_path / "python", [], {})
