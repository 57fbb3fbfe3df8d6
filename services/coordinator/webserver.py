"""The HTTP server of the API: which proxies it believes, and what one client may occupy of it.

Bounds are kept at the connection, before a request reaches the application: how many connections there are, in all and
per address, how long a head or a body may take, and how many bytes a head may have. The parser itself has no such
bounds, and its work on one header grows with the square of its length.
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
"""Requests of one connection that wait for the one before."""
WRITE_S, WRITE_BYTES = 60.0, 16 << 10
"""A client that takes less than this of its answer within this time is dropped, while more waits for it."""
FLUSH_S = 5.0
"""So long a client has to take the answer that ends its connection."""
PER_TURN = 32
"""Connections that end in one turn of the loop."""
KEEP_ALIVE_S = 20
"""A connection stays open so long without a request: longer than clients keep one (httpx and what is built on it: 5 s).
So it is they who close it, and none of them sends a request into a connection that is being closed."""
SPARE_FILES = 512
"""Descriptors for everything but clients."""

REFUSED = metrics.counter("http_connections_refused", "Connections ended by a bound of the server.", ("reason",))
OPEN = metrics.gauge("http_connections", "Connections of clients.")


def server_of(app: ASGIApp, settings: ServiceSettings) -> uvicorn.Server:
    """A server of ``app`` that leaves signals alone.

    Raises:
        ConfigError: PENSTOCK_FORWARDED_ALLOW_IPS names what is no address and no network.
    """
    proxies = _proxies(settings.forwarded_allow_ips)
    bounds = _Bounds(settings, proxies)

    def protocol(**given: Any) -> asyncio.Protocol:
        return _BoundedProtocol(bounds, **given)

    given: Any = protocol  # a function makes protocols as well as a class
    config = uvicorn.Config(
        app, host=settings.http_host, port=settings.http_port, log_config=None, access_log=False,
        timeout_graceful_shutdown=3, lifespan="on", proxy_headers=bool(proxies), forwarded_allow_ips=proxies,
        http=given, ws="none", timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    return server


class _Bounds:
    """State that all connections of a server share."""

    def __init__(self, settings: ServiceSettings, proxies: list[str]) -> None:
        self.head_bytes, self.head_s, self.body_s = settings.http_head_bytes, settings.http_head_s, settings.http_body_s
        self._most = min(settings.http_connections, _file_limit(settings.http_connections + SPARE_FILES) - SPARE_FILES)
        self._most_of_one = settings.http_connections_per_address
        self._everyone = proxies == ["*"]
        self._proxies = [] if self._everyone else [ipaddress.ip_network(proxy) for proxy in proxies]
        self._open: Counter[str] = Counter()
        self._ending: deque[Callable[[], None]] = deque()

    def enter(self, host: str) -> str:
        """Count a connection from ``host``; why there is no room for it, or ''."""
        address = subscriber(host)
        self._open[address] += 1
        OPEN.set(self._open.total())
        if self._open.total() > self._most:
            return "connections"
        return "address" if self._open[address] > self._most_of_one and not self._is_proxy(host) else ""

    def leave(self, host: str) -> None:
        """A connection from ``host`` is gone."""
        address = subscriber(host)
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]
        OPEN.set(self._open.total())

    def later(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        """End a connection that is gone, few in one turn of the loop: the tasks of all of them wake."""
        if not self._ending:
            loop.call_soon(self._end_some, loop)
        self._ending.append(end)

    def _end_some(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(PER_TURN, len(self._ending))):
            self._ending.popleft()()
        if self._ending:
            loop.call_soon(self._end_some, loop)

    def _is_proxy(self, host: str) -> bool:
        """Many clients share the address of a proxy."""
        if self._everyone:
            return True
        with contextlib.suppress(ValueError):
            return any(ipaddress.ip_address(host) in network for network in self._proxies)
        return False


class _BoundedProtocol(HttpToolsProtocol):
    """One connection. A head or a body that is too slow ends it with 408, a head that is too long with 431."""

    def __init__(self, bounds: _Bounds, **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self._host = ""
        self._is_counted = self._is_refused = False
        self._in_body = False
        self._silent_bytes = 0
        """Bytes since the parser last ended a head or a message, or gave a part of a body."""
        self._body_bytes = 0
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Serve it, or refuse it where there are too many."""
        super().connection_made(transport)
        self._host = self.client[0] if self.client else ""
        self._is_counted = True
        if full := self._bounds.enter(self._host):
            detail = "from this address" if full == "address" else "at this server"
            self._refuse(503, "too_many_connections", f"too many connections {detail}; come back in a moment", full)
            return
        self._begin(self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give its place back."""
        self._stop_timer()
        if self._writer is not None:
            self._writer.cancel()
        if self._is_counted:
            self._is_counted = False
            self._bounds.leave(self._host)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # at once: what writes to it until its end has its turn would raise
        self._bounds.later(self.loop, partial(HttpToolsProtocol.connection_lost, self, exc))

    def data_received(self, data: bytes) -> None:
        """Parse, in pieces none of which can be more than a head may have."""
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
        """One header, or trailer."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head(f"the request has more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        """Start the request: its head is there."""
        if self._is_refused:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._end_behind_pipeline()
            return
        super().on_headers_complete()  # raises where the target is no URL
        self._silent_bytes = self._body_bytes = 0
        self._in_body = True
        self._begin(self._bounds.body_s)

    def _end_behind_pipeline(self) -> None:
        """Answer the requests that wait, and end the connection behind them: the client sends the others again."""
        self._is_refused = True
        REFUSED.labels("pipeline").inc()
        self._stop_timer()
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._silent_bytes = 0
        self._body_bytes += len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there as a whole."""
        self._in_body = False
        self._silent_bytes = 0
        self._stop_timer()
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP."""
        if not self._is_refused:
            self._refuse(400, "malformed_request", msg, "malformed")

    def pause_writing(self) -> None:
        """The client reads slower than it is answered."""
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has read on."""
        super().resume_writing()
        if self._writer is not None:
            self._writer.cancel()

    def _look_at_writing(self, before: int) -> None:
        """Drop a client that took too little of the ``before`` bytes that waited for it at the last look."""
        left = self.transport.get_write_buffer_size()
        if left > before - WRITE_BYTES:
            self.transport.abort()
        else:
            self._watch_writing(left)

    def _watch_writing(self, left: int) -> None:
        self._writer = self.loop.call_later(WRITE_S, self._look_at_writing, left)

    def _unsupported_upgrade_warning(self) -> None:
        """A client that offers another protocol is answered in this one, as the standard has it."""

    def _begin(self, seconds: float) -> None:
        """From now on a head or a body has this long."""
        self._stop_timer()
        self._began = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """The deadline passed: of a body that comes fast enough, or that the application does not read, it moves."""
        self._timer = None
        if self.transport.is_closing():
            return
        now = self.loop.time()
        if self._in_body:
            left = self._began + self._bounds.body_s + self._body_bytes / BODY_BYTES_PER_S - now
            if self.flow.read_paused:
                left = max(left, self._bounds.body_s)
            if left > 0:
                self._timer = self.loop.call_later(left, self._look)
                return
            self._refuse(408, "slow_body", "the body of the request did not come in time", "slow body")
        elif self._silent_bytes and self.cycle is not None and not self.cycle.response_complete:
            self._timer = self.loop.call_later(self._bounds.head_s, self._look)  # the answer before it goes on
        elif self._silent_bytes:
            self._refuse(408, "slow_head", "the head of the request did not come in time", "slow head")
        elif self.cycle is None or self.cycle.response_complete:
            REFUSED.labels("idle").inc()
            self.transport.close()

    def _refuse_head(self, detail: str) -> None:
        self._refuse(431, "head_too_long", detail, "long head")

    @property
    def _can_answer(self) -> bool:
        """True if what is written now is the answer to the request that is refused."""
        if self._in_body:
            return self.cycle is not None and not self.cycle.response_started and not self.pipeline
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, code: str, detail: str, reason: str) -> None:
        """Answer, unless an answer has begun, and end the connection."""
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
    """Raise the soft limit of open files to ``wanted``, as far as the hard one allows; the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(soft, 2 * SPARE_FILES)


def _proxies(text: str) -> list[str]:
    """Read here first: what uvicorn cannot read it takes for a name, which no client ever has."""
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
