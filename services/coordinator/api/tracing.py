"""Where traces begin: at a request."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.shared.protocol.trace import new_trace, trace_of, tracing

__all__ = ["Traced"]


class Traced:
    """ASGI middleware: a request goes on with the trace of its ``traceparent`` header, or begins one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with tracing(trace_of(Headers(scope=scope).get("traceparent", "")) or new_trace()):
            await self.app(scope, receive, send)
