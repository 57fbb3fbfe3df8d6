"""The HTTP server of the API: trusted proxies, and limits on what one client may use.

The limits apply to the connection, before a request reaches the application: the number of connections, in all and per
address, the time that a head or a body may take, and the bytes of a head. The parser itself has no such limits, and its
work on one header grows with the square of its length.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.services.coordinator.api.guard import BODY_BYTES_PER_S, MAX_HEADERS
from penstock.services.coordinator.api.http.ratelimit import subscriber
from penstock.services.coordinator.api.http.replies import problem_body
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.runtime import metrics

__all__ = ["server_of"]

MAX_PIPELINED = 16
"""Number of pipelined requests of one connection that may wait."""
WRITE_S, WRITE_BYTES = 60.0, 16 << 10
"""A client with pending output that takes fewer than WRITE_BYTES in WRITE_S seconds is disconnected."""
FLUSH_S = 5.0
"""Time that a client has to read the response that ends its connection (seconds)."""
PER_TURN = 32
"""Number of connections that are cleaned up per turn of the event loop."""
KEEP_ALIVE_S = 20
"""Idle time before the server closes a connection (seconds). Clients close idle connections earlier (httpx: after 5 s),
so that no client sends a request into a connection that the server is closing."""
SPARE_FILES = 512
"""Number of file descriptors that connections of clients may not use."""

REFUSED = metrics.counter("http_connections_refused", "Connections ended by a bound of the server.", ("reason",))
OPEN = metrics.gauge("http_connections", "Connections of clients.")


def server_of(app: ASGIApp, settings: ServiceSettings) -> uvicorn.Server:
    """Return a uvicorn server of ``app`` that installs no signal handlers.

    Raises:
        ConfigError: PENSTOCK_FORWARDED_ALLOW_IPS has an entry that is neither an address nor a network.
    """
    proxies = _proxies(settings.forwarded_allow_ips)
    bounds = _Bounds(settings, proxies)

    def protocol(**given: Any) -> asyncio.Protocol:
        return _BoundedProtocol(bounds, **given)

    given: Any = protocol  # uvicorn calls it like a class
    config = uvicorn.Config(
        app, host=settings.http_host, port=settings.http_port, log_config=None, access_log=False,
        timeout_graceful_shutdown=3, lifespan="on", proxy_headers=bool(proxies), forwarded_allow_ips=proxies,
        http=given, ws="none", timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    return server


class _Bounds:
    """Limits that all connections of a server share, and the number of open connections per address."""

    def __init__(self, settings: ServiceSettings, proxies: list[str]) -> None:
        self.head_bytes, self.head_s, self.body_s = settings.http_head_bytes, settings.http_head_s, settings.http_body_s
        self._most = min(settings.http_connections, _file_limit(settings.http_connections + SPARE_FILES) - SPARE_FILES)
        self._most_of_one = settings.http_connections_per_address
        self._everyone = proxies == ["*"]
        self._proxies = [] if self._everyone else [ipaddress.ip_network(proxy) for proxy in proxies]
        self._open: Counter[str] = Counter()
        self._ending: deque[Callable[[], None]] = deque()

    def enter(self, host: str) -> str:
        """Count a connection from ``host``; return the name of the limit that the connection exceeds, or ''."""
        address = subscriber(host)
        self._open[address] += 1
        OPEN.set(self._open.total())
        if self._open.total() > self._most:
            return "connections"
        return "address" if self._open[address] > self._most_of_one and not self._is_proxy(host) else ""

    def leave(self, host: str) -> None:
        """Stop counting a connection from ``host``."""
        address = subscriber(host)
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]
        OPEN.set(self._open.total())

    def later(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        """Schedule the cleanup of a closed connection, a few per turn of the loop, because each cleanup wakes tasks."""
        if not self._ending:
            loop.call_soon(self._end_some, loop)
        self._ending.append(end)

    def _end_some(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(PER_TURN, len(self._ending))):
            self._ending.popleft()()
        if self._ending:
            loop.call_soon(self._end_some, loop)

    def _is_proxy(self, host: str) -> bool:
        """Return True if ``host`` is a proxy, whose address many clients share."""
        if self._everyone:
            return True
        with contextlib.suppress(ValueError):
            return any(ipaddress.ip_address(host) in network for network in self._proxies)
        return False


class _BoundedProtocol(HttpToolsProtocol):
    """One connection of a client. A request gets 408 if its head or body is too slow, and 431 if its head is too
    long."""

    def __init__(self, bounds: _Bounds, **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self._host = ""
        self._is_counted = self._is_refused = False
        self._in_body = False
        self._silent_bytes = 0
        """Number of bytes received since the parser last completed a head or a message, or returned a part of a
        body."""
        self._body_bytes = 0
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it with 503 if there are too many."""
        super().connection_made(transport)
        self._host = self.client[0] if self.client else ""
        self._is_counted = True
        if full := self._bounds.enter(self._host):
            detail = "from this address" if full == "address" else "at this server"
            self._refuse(503, "too_many_connections", f"too many connections {detail}; come back in a moment", full)
            return
        self._begin(self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's slot."""
        self._stop_timer()
        if self._writer is not None:
            self._writer.cancel()
        if self._is_counted:
            self._is_counted = False
            self._bounds.leave(self._host)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # now: before its cleanup runs, a write would raise
        self._bounds.later(self.loop, partial(HttpToolsProtocol.connection_lost, self, exc))

    def data_received(self, data: bytes) -> None:
        """Parse received data in pieces. No piece is longer than the number of bytes by which the head of the request
        may still grow."""
        if not self._in_body and self._timer is None and not self._is_refused:
            self._begin(self._bounds.head_s)
        while data and not self._is_refused and not self.transport.is_closing():
            room = self._bounds.head_bytes - self._silent_bytes
            if room <= 0:
                self._refuse_head(f"the head of the request is longer than {self._bounds.head_bytes} bytes")
                return
            piece, data = data[:room], data[room:]
            self._silent_bytes += len(piece)
            super().data_received(piece)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store one header or trailer; refuse a request that has too many of them."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head(f"the request has more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        """Start the request once its head is complete."""
        if self._is_refused:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._end_behind_pipeline()
            return
        super().on_headers_complete()  # raises for an invalid target
        self._silent_bytes = self._body_bytes = 0
        self._in_body = True
        self._begin(self._bounds.body_s)

    def _end_behind_pipeline(self) -> None:
        """Answer the requests that wait on this connection, then close the connection. The client must repeat its later
        requests."""
        self._is_refused = True
        REFUSED.labels("pipeline").inc()
        self._stop_timer()
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body to the application."""
        self._silent_bytes = 0
        self._body_bytes += len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the request."""
        self._in_body = False
        self._silent_bytes = 0
        self._stop_timer()
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        if not self._is_refused:
            self._refuse(400, "malformed_request", msg, "malformed")

    def pause_writing(self) -> None:
        """Start the write timeout: the client reads slower than the response is written."""
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the write timeout: the client has read enough of the response."""
        super().resume_writing()
        if self._writer is not None:
            self._writer.cancel()

    def _check_writing(self, before: int) -> None:
        """Disconnect the client if it has read fewer than WRITE_BYTES since the last check, when ``before`` bytes were
        unsent."""
        left = self.transport.get_write_buffer_size()
        if left > before - WRITE_BYTES:
            self.transport.abort()
        else:
            self._watch_writing(left)

    def _watch_writing(self, left: int) -> None:
        self._writer = self.loop.call_later(WRITE_S, self._check_writing, left)

    def _unsupported_upgrade_warning(self) -> None:
        """Suppress uvicorn's warning about a request to upgrade the protocol: the server answers such a request in
        HTTP/1.1, as the standard allows."""

    def _begin(self, seconds: float) -> None:
        """Start the deadline of a head or a body."""
        self._stop_timer()
        self._began = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._check_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        """Enforce the deadline; extend it for a body that arrives fast enough or that the application leaves unread."""
        self._timer = None
        if self.transport.is_closing():
            return
        now = self.loop.time()
        if self._in_body:
            left = self._began + self._bounds.body_s + self._body_bytes / BODY_BYTES_PER_S - now
            if self.flow.read_paused:
                left = max(left, self._bounds.body_s)
            if left > 0:
                self._timer = self.loop.call_later(left, self._check_deadline)
                return
            self._refuse(408, "slow_body", "the body of the request did not come in time", "slow body")
        elif self._silent_bytes and self.cycle is not None and not self.cycle.response_complete:
            # The previous response continues.
            self._timer = self.loop.call_later(self._bounds.head_s, self._check_deadline)
        elif self._silent_bytes:
            self._refuse(408, "slow_head", "the head of the request did not come in time", "slow head")
        elif self.cycle is None or self.cycle.response_complete:
            REFUSED.labels("idle").inc()
            self.transport.close()

    def _refuse_head(self, detail: str) -> None:
        self._refuse(431, "head_too_long", detail, "long head")

    @property
    def _can_answer(self) -> bool:
        """Return True if the client would understand a response sent now as the answer to the refused request."""
        if self._in_body:
            return self.cycle is not None and not self.cycle.response_started and not self.pipeline
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, code: str, detail: str, reason: str) -> None:
        """Send the error if ``_can_answer`` allows it, and close the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        REFUSED.labels(reason).inc()
        if self._can_answer:
            body = orjson.dumps(problem_body(HttpProblem(status, code, detail), "").document())
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
            head = [line, "content-type: application/problem+json", "connection: close", f"content-length: {len(body)}"]
            head += ["retry-after: 1"] if status in (429, 503) else []
            self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()
        self._writer = self.loop.call_later(FLUSH_S, self.transport.abort)


def _file_limit(wanted: int) -> int:
    """Raise the soft limit of open files to ``wanted``, as far as the hard limit allows; return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(soft, 2 * SPARE_FILES)


def _proxies(text: str) -> list[str]:
    """Parse and check the list of trusted proxies; uvicorn would take an invalid entry for a host name."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if found == ["*"]:
        return found
    for part in found:
        try:
            ipaddress.ip_network(part)
        except ValueError as error:
            raise ConfigError(
                f"PENSTOCK_FORWARDED_ALLOW_IPS: {error}; it must look like 10.0.0.1,10.1.0.0/16"
            ) from None
    return found
