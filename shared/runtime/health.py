"""HTTP server with ``/healthz``, ``/readyz`` and ``/metrics`` of a process, without dependencies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import orjson

from penstock.shared.errors import ConfigError
from penstock.shared.runtime import metrics

__all__ = ["HealthServer"]

REQUEST_S = 5.0
REQUEST_BYTES = 16 << 10
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
JSON = "application/json"


class HealthServer:
    """HTTP server that runs until the ``async with`` block ends. The function ``ready`` returns the readiness of the
    process, and details for display."""

    def __init__(self, host: str, port: int, ready: Callable[[], tuple[bool, dict[str, Any]]]) -> None:
        self.host = host
        self.port = port
        """Port; if 0 was given, the port in use once the server has started."""
        self._ready = ready
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=REQUEST_BYTES)
        except OSError as error:
            raise ConfigError(
                f"cannot serve health on {self.host}:{self.port}: {error.strerror or error}; set PENSTOCK_HEALTH_PORT"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = self._answer(head)
                lines = (
                    f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                )
                if not head.startswith(b"HEAD "):
                    writer.write((lines + "Connection: close\r\n\r\n").encode() + body)
                else:
                    writer.write((lines + "Connection: close\r\n\r\n").encode())
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client disconnected or never sent a request
        finally:
            writer.close()

    def _answer(self, head: bytes) -> tuple[int, str, bytes]:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3:
            return 400, JSON, b'{"error":"not an HTTP request"}'
        if words[0] not in (b"GET", b"HEAD"):
            return 405, JSON, b'{"error":"use GET"}'
        path = words[1].partition(b"?")[0]
        if path == b"/healthz":
            return 200, JSON, b'{"status":"ok"}'
        if path == b"/readyz":
            ready, details = self._ready()
            body = orjson.dumps({"status": "ready" if ready else "not ready", **details}, default=str)
            return (200 if ready else 503), JSON, body
        if path == b"/metrics":
            return 200, metrics.CONTENT_TYPE, metrics.render()
        return 404, JSON, b'{"error":"there is /healthz, /readyz and /metrics"}'
