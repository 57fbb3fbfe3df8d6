"""What every request passes before a route sees it: identity, rate, size; and its count and time after."""

from __future__ import annotations

import time
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.services.coordinator.api.auth import KeyRing
from penstock.services.coordinator.api.ratelimit import RateLimiter
from penstock.services.coordinator.api.replies import HttpProblem, problem_response
from penstock.shared.runtime import metrics

__all__ = ["MAX_BODY_BYTES", "OPEN_PATHS", "Guard", "Measured"]

MAX_BODY_BYTES = 1 << 20
"""Longest request body; enforced while it is read, whatever Content-Length says."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v1/version", "/openapi.json", "/metrics"})
"""Served without a key and without counting."""


REQUESTS = metrics.counter("http_requests", "Requests of the API.", ("route", "method", "code"))
SECONDS = metrics.histogram("http_request_duration_seconds", "Time to the start of the reply.", ("route",))


class Guard:
    """ASGI middleware: a key where keys exist, at most so many requests, at most so many bytes."""

    def __init__(self, app: ASGIApp, keys: KeyRing, limiter: RateLimiter) -> None:
        self.app = app
        self.keys = keys
        self.limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reply = _Reply(send)
        try:
            if scope["path"] not in OPEN_PATHS:
                await self._admit(scope, reply)
            await self.app(scope, _limited(Headers(scope=scope), receive), reply)
        except HttpProblem as problem:
            if reply.started:
                raise
            await problem_response(problem, scope["path"])(scope, receive, reply)

    async def _admit(self, scope: Scope, reply: _Reply) -> None:
        caller = self.keys.caller(Headers(scope=scope))
        scope.setdefault("state", {})["caller"] = caller
        client = scope.get("client")
        peer = f"{caller}@{client[0]}" if client and not self.keys.required else caller
        allowance = await self.limiter.hit(peer)
        reply.extra = allowance.headers()
        if not allowance.allowed:
            raise HttpProblem(
                429,
                "rate_limited",
                f"more than {allowance.limit} requests in {allowance.window_s} s; wait {allowance.reset_s} s",
            )


class _Reply:
    """Passes a reply on with extra headers, and knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.extra: Mapping[str, str] = {}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            headers.update(self.extra)
        await self._send(message)


def _limited(headers: Headers, receive: Receive) -> Receive:
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return counted


def _too_large() -> HttpProblem:
    return HttpProblem(
        413, "too_large", f"the body is longer than {MAX_BODY_BYTES} bytes", headers={"Connection": "close"}
    )


class Measured:
    """ASGI middleware: counts and times requests by route template (never by id)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and record it."""
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
