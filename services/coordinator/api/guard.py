"""Middleware around every route: authentication, rate and size limits before it, request metrics after it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.services.coordinator.api.dashboard import is_asset
from penstock.services.coordinator.api.http.occupancy import LargeBody, Occupancy
from penstock.services.coordinator.api.http.ratelimit import RateLimiter
from penstock.services.coordinator.api.http.replies import problem_response
from penstock.services.coordinator.api.http.turns import Turns
from penstock.services.coordinator.auth import ANONYMOUS, KeyRing
from penstock.services.coordinator.problems import HttpProblem, from_error
from penstock.shared.errors import PenstockError
from penstock.shared.runtime import metrics

__all__ = [
    "BODY_BYTES_PER_S",
    "MAX_BODY_BYTES",
    "MAX_FILE_BYTES",
    "MAX_HEADERS",
    "MAX_LARGE_BYTES",
    "OPEN_PATHS",
    "Guard",
    "Measured",
    "body_limit",
]

MAX_BODY_BYTES = 1 << 20
"""Largest request body in bytes, enforced while it is read, whatever Content-Length says."""
MAX_LARGE_BYTES = 8 << 20
"""Largest body in bytes on routes that accept whole conversations or batches of feedback."""
MAX_OPEN_BYTES = 16 << 10
"""Largest body in bytes of a request to a path that needs no key. The routes at these paths read no body."""
MAX_FILE_BYTES = 64 << 20
"""Largest body in bytes of an upload. Larger data sets belong on a shared path that the job file names."""
MAX_HEADERS = 256
BODY_BYTES_PER_S = 16 << 10
"""Minimum upload rate: every BODY_BYTES_PER_S received bytes extend the deadline of a body by one second."""
LIVE_PATHS = frozenset({"/feedback", "/v1/feedback", "/v1/feedback/batch"})
LIVE_ENDS = ("/chat/completions", "/v1/completions")
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v1/version", "/openapi.json"})
"""Paths served without a key and outside the rate limits."""
PER_TURN = 16
"""Maximum number of requests that start in one iteration of the event loop; each blocks it for about a millisecond."""

REQUESTS = metrics.counter("http_requests", "Requests of the API.", ("route", "method", "code"))
SECONDS = metrics.histogram("http_request_duration_seconds", "Time to the start of the reply.", ("route",))


class Guard:
    """ASGI middleware that authenticates requests, and limits rate (per address and key), concurrency and size."""

    def __init__(self, app: ASGIApp, keys: KeyRing, limiter: RateLimiter, occupancy: Occupancy) -> None:
        self.app = app
        self.keys = keys
        self.limiter = limiter
        self.occupancy = occupancy
        self._turns = Turns(PER_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reply = _Reply(send)
        await self._turns.wait()
        try:
            if scope["path"] in OPEN_PATHS or is_asset(scope["path"]):
                await self.app(scope, _limited(Headers(scope=scope), receive, MAX_OPEN_BYTES), reply)
                return
            owner = await self._admit(scope, reply)
            with self.occupancy.request(owner):
                await self._serve(scope, receive, reply, self.occupancy.large_body(owner))
        except PenstockError as error:
            if reply.started:
                raise
            await problem_response(from_error(error), scope["path"])(scope, receive, reply)

    async def _serve(self, scope: Scope, receive: Receive, reply: _Reply, large: LargeBody) -> None:
        scope["state"]["large_body"] = large
        try:
            limit = body_limit(scope["path"])
            await self.app(scope, _limited(Headers(scope=scope), receive, limit, large), reply)
        finally:
            await large.leave()

    async def _admit(self, scope: Scope, reply: _Reply) -> str:
        """Authenticate and count a request; return its owner: the key id, or ``local@ADDRESS`` if no keys exist.

        Raises:
            HttpProblem: 401 no valid key, 403 a web page calls an API without keys, 429 a rate limit is exceeded.
        """
        client = scope.get("client")
        address = await self.limiter.hit_address(client[0] if client else "")
        if address is not None:  # before the key is checked, so that guesses count
            reply.extra = address.headers()
            if not address.allowed:
                raise address.refusal("address_rate_limited", "from this address")
        caller = await self.keys.caller(Headers(scope=scope))
        owner = f"{caller.id}@{client[0]}" if client and caller is ANONYMOUS else caller.id
        scope.setdefault("state", {}).update(caller=caller, owner=owner)
        peer = owner if caller is ANONYMOUS else caller.sender
        live = is_live(scope["path"])
        allowance = await self.limiter.hit(peer, caller.rate_limit, live=live)
        if allowance.allowed and caller.sender != caller.id:  # a derived key also counts for its maker
            of_maker = await self.limiter.hit(caller.id, caller.rate_limit, live=live)
            allowance = allowance if of_maker.allowed else of_maker
        reply.extra = allowance.headers()
        if not allowance.allowed:
            raise allowance.refusal("rate_limited", "of this caller")
        return owner


class _Reply:
    """ASGI ``send`` that adds headers to the reply, and sets ``started`` once the reply has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.extra: Mapping[str, str] = {}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in self.extra.items():
                headers.setdefault(name, value)  # a refusal keeps the headers of its own limit
        await self._send(message)


def body_limit(path: str) -> int:
    """Return the largest body of a request to ``path``, in bytes."""
    if path == "/v1/files":
        return MAX_FILE_BYTES
    return MAX_LARGE_BYTES if is_live(path) else MAX_BODY_BYTES


def is_live(path: str) -> bool:
    """Return True for a path of completions or feedback, whose requests are frequent and hold whole conversations."""
    return path in LIVE_PATHS or path.endswith(LIVE_ENDS)


def _limited(headers: Headers, receive: Receive, limit: int, large: LargeBody | None = None) -> Receive:
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit)
        if seen > MAX_BODY_BYTES and large is not None:
            await large.enter()
        return message

    return counted


def _too_large(limit: int) -> HttpProblem:
    detail = f"the body is longer than {limit} bytes"
    return HttpProblem(413, "too_large", detail, max_bytes=limit, headers={"Connection": "close"})


class Measured:
    """ASGI middleware that counts and times requests by route template, never by id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and record its status and time."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unmatched")
                REQUESTS.labels(route, scope["method"], str(message["status"])).inc()
                SECONDS.labels(route).observe(time.perf_counter() - began)
            await send(message)

        await self.app(scope, receive, watched)
