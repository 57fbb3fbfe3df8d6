"""Assembly of the HTTP application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import __version__
from penstock.services.coordinator.api import (
    audit_log,
    dashboard,
    files,
    fine_tuning,
    graders,
    keys,
    openapi,
    system,
    webhooks,
)
from penstock.services.coordinator.api.access import Backend
from penstock.services.coordinator.api.audited import Audited, audited_routes
from penstock.services.coordinator.api.feeds import Feeds
from penstock.services.coordinator.api.guard import Guard, Measured
from penstock.services.coordinator.api.http.idempotency import Idempotency, ReplyStore
from penstock.services.coordinator.api.http.occupancy import Occupancy
from penstock.services.coordinator.api.http.ratelimit import RateLimiter
from penstock.services.coordinator.api.http.replies import problem_response
from penstock.services.coordinator.api.http.volatile import Volatile
from penstock.services.coordinator.api.jobs import (
    amend,
    checkpoints,
    deadletters,
    jobs,
    observe,
    samples,
    scaling,
    versions,
)
from penstock.services.coordinator.api.live import (
    episodes,
    feedback,
    feedback_tokens,
    inference,
    model_versions,
    quarantine,
)
from penstock.services.coordinator.api.live.direct import Direct
from penstock.services.coordinator.auth import KeyRing
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.problems import Flaw, HttpProblem, from_error
from penstock.services.coordinator.services import Services
from penstock.services.coordinator.serving.gateway import Gateway
from penstock.shared.errors import PenstockError
from penstock.shared.protocol.trace import new_trace, trace_of, tracing

__all__ = ["ROUTERS", "Traced", "create_app"]


class Traced:
    """ASGI middleware that continues the trace of a request's ``traceparent`` header, or starts a new trace."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request within its trace."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with tracing(trace_of(Headers(scope=scope).get("traceparent", "")) or new_trace()):
            await self.app(scope, receive, send)


log = logging.getLogger(__name__)

ROUTERS = (
    jobs.router, amend.router, observe.router, checkpoints.router, checkpoints.artifacts,
    samples.router, deadletters.router, keys.router, inference.router, episodes.router,
    feedback.router, feedback_tokens.router, versions.router, model_versions.router, quarantine.router,
    quarantine.all_jobs, files.router, fine_tuning.router, graders.router, webhooks.router, scaling.router,
    system.router, audit_log.router,
)  # fmt: skip


def create_app(
    services: Services,
    *,
    stopping: asyncio.Event | None = None,
    feedback_service: FeedbackService | None = None,
    serving: Gateway | None = None,
) -> FastAPI:
    """Return the HTTP application over ``services``.

    Set ``stopping`` to end event streams and long polls, so that a graceful shutdown does not wait for clients that
    stay connected. Without ``feedback_service`` the application accepts no feedback, and without ``serving`` it serves
    no models.

    Raises:
        ConfigError: a rate limit cannot be parsed; or no keys are configured and the API would listen on the network,
            or on loopback without PENSTOCK_OPEN_LOOPBACK.
    """
    settings = services.settings
    volatile = Volatile(settings.redis_url)
    ring = KeyRing(settings, services.keys)
    limiter, occupancy = RateLimiter(settings, volatile), Occupancy(settings)
    stopping = stopping or asyncio.Event()
    feeds = Feeds(services.jobs, services.events, stopping)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await feeds.close()
        occupancy.close()
        await volatile.close()

    app = FastAPI(
        title="Penstock",
        version=__version__,
        summary="Reinforcement-learning jobs over HTTP.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.backend = Backend(
        **vars(services), stopping=stopping, volatile=volatile, ring=ring, limiter=limiter, occupancy=occupancy,
        feeds=feeds, feedback=feedback_service, serving=serving,
    )  # fmt: skip
    app.openapi = lambda: openapi.describe(app, ROUTERS)  # type: ignore[method-assign]
    document = openapi.Document(app.openapi)
    app.add_api_route("/openapi.json", document.__call__, include_in_schema=False)
    app.add_api_route("/docs", document.page, include_in_schema=False)
    for router in (*ROUTERS, dashboard.router):
        app.router.routes.extend(router.routes)  # include_router analyses every signature once more
    _handle_errors(app)
    app.add_middleware(Direct, posts={**feedback.DIRECT, **inference.DIRECT}, backend=app.state.backend)
    app.add_middleware(Idempotency, store=ReplyStore(volatile))
    app.add_middleware(Audited, routes=audited_routes(ROUTERS), backend=app.state.backend)
    app.add_middleware(Guard, keys=ring, limiter=limiter, occupancy=occupancy)
    app.add_middleware(Measured)
    app.add_middleware(Traced)
    return app


def _handle_errors(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, PenstockError)
        problem = from_error(error)
        if problem.status == 500:
            log.error("%s %s failed: %s", request.method, request.url.path, error, exc_info=error)
        return problem_response(problem, request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        flaws = [Flaw(pointer=_pointer(e["loc"]), detail=e["msg"]) for e in error.errors()]
        detail = "; ".join(f"{flaw.pointer}: {flaw.detail}" for flaw in flaws)
        return problem_response(HttpProblem(422, "invalid_request", detail, errors=flaws), request.url.path)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "no_such_route", 405: "method_not_allowed"}.get(error.status_code, "refused")
        detail = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(openapi.methods_of(ROUTERS, request.url.path))
        return problem_response(HttpProblem(error.status_code, code, detail, headers=headers), request.url.path)

    async def defect(request: Request, error: Exception) -> Response:
        problem = HttpProblem(500, "internal", f"{type(error).__name__}; the coordinator's log has the details")
        return problem_response(problem, request.url.path)

    app.add_exception_handler(PenstockError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, defect)


def _pointer(loc: tuple[Any, ...]) -> str:
    return "".join(f"/{part}" for part in loc)
