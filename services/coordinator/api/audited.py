"""Selection of the requests that the audit log records, and the middleware that records them.

A route that changes something is audited unless it is in ``DATA_PATHS``. A request whose key lacks the route's scope
leaves no record; otherwise the keys of agents and browsers could fill the log and displace important records.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import uuid6
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.services.coordinator.api.access import Backend
from penstock.services.coordinator.api.guard import is_live
from penstock.services.coordinator.api.scopes import ScopeCheck, check_of
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import from_error
from penstock.shared.errors import PenstockError, Unavailable
from penstock.shared.protocol.audit_log import AuditRecord
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.trace import current_trace
from penstock.shared.runtime import metrics

__all__ = ["DATA_PATHS", "MUTATING", "Audited", "AuditedRoute", "audited_routes", "route_of"]

log = logging.getLogger(__name__)

MUTATING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
DATA_PATHS = frozenset({
    "/v1/chat/completions", "/e/{episode_id}/v1/chat/completions", "/v1/completions", "/e/{episode_id}/v1/completions",
    "/feedback", "/v1/feedback", "/v1/feedback/batch", "/v1/feedback/tokens",
    "/v1/episodes", "/v1/episodes/{episode}/end", "/v1/episodes/{episode}/keys",
})  # fmt: skip
"""Paths of frequent requests of agents and web pages, which the audit log leaves out: completions, feedback, episodes,
episode keys and feedback tokens. Their results are stored in INTERACTIONS, FEEDBACK and the bucket ``episodes``."""
MAX_VALUE = 128
"""Longest stored value of a path or query parameter, in characters."""
_JOB = re.compile(r"(?:^|/jobs/)(job_[0-9a-f]{32})(?:/|$)", re.ASCII)

RECORDS = metrics.counter("audit_records", "Records of the audit log, stored or lost.", ("outcome",))


@dataclass(frozen=True)
class AuditedRoute:
    """A route whose requests are recorded. ``query`` holds the names of its query parameters."""

    method: str
    template: str
    pattern: re.Pattern[str]
    check: ScopeCheck
    query: frozenset[str]


def audited_routes(routers: Iterable[APIRouter]) -> list[AuditedRoute]:
    """Return the routes of ``routers`` with a method that changes something (such as POST), except those in
    DATA_PATHS."""
    found = []
    routes = (route for router in routers for route in router.routes if isinstance(route, APIRoute))
    for route in routes:
        for method in sorted(MUTATING & (route.methods or set())):
            if route.path_format in DATA_PATHS:
                continue
            check = check_of(route)
            assert check is not None, f"{method} {route.path} requires no scope"
            query = frozenset(field.alias for field in route.dependant.query_params)
            found.append(AuditedRoute(method, route.path_format, route.path_regex, check, query))
    return found


def route_of(routes: Iterable[AuditedRoute], method: str, path: str) -> tuple[AuditedRoute, dict[str, str]] | None:
    """Return the audited route of a request and the values of its path parameters, or None for other requests."""
    for route in routes:
        if route.method == method and (found := route.pattern.match(path)) is not None:
            return route, found.groupdict()
    return None


class Audited:
    """ASGI middleware that stores the record of an audited request before the reply to that request starts. ``Guard``
    calls it after authentication.

    The request has been executed by then. If the record cannot be stored, the reply is sent nevertheless: the process
    log then holds the record at level error, and ``penstock_audit_records_total{outcome="lost"}`` counts it.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[AuditedRoute], backend: Backend) -> None:
        self.app = app
        self.routes = list(routes)
        self.backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        changes = scope["type"] == "http" and scope["method"] in MUTATING and not is_live(scope["path"])
        found = route_of(self.routes, scope["method"], scope["path"]) if changes else None
        if found is None:
            await self.app(scope, receive, send)
            return
        request = _Request(scope, *found, self.backend)
        replied = False

        async def send_audited(message: Message) -> None:
            nonlocal replied
            if message["type"] == "http.response.start":
                replied = True
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", request.id)
                await self._store(request, message["status"], headers)
            await send(message)

        try:
            await self.app(scope, request.reading(receive), send_audited)
        except Exception as error:
            if not replied:
                status = from_error(error).status if isinstance(error, PenstockError) else 500
                await self._store(request, status, Headers())
            raise

    async def _store(self, request: _Request, status: int, reply: Headers) -> None:
        """Write the request to the process log. Also store its audit record if the caller has the scope of the
        route."""
        record = request.record(status, reply)
        fields = msgspec.to_builtins(record)
        line = {name: value for name, value in fields.items() if value and name not in ("time", "trace")}
        log.info("%s %s %d", record.method, record.route, status, extra=line)
        if not request.allowed:
            return
        try:
            await self.backend.audit_log.append(record)
        except PenstockError as error:
            RECORDS.labels("lost").inc()
            log.error("the audit log lacks request %s: %s", record.request, error, extra={"record": fields})
        else:
            RECORDS.labels("stored").inc()


class _Request:
    """Builder of one audit record; it hashes the body of the request while the route reads it."""

    def __init__(self, scope: Scope, route: AuditedRoute, path: dict[str, str], backend: Backend) -> None:
        self.id = f"req_{uuid6.uuid7().hex}"
        self._scope, self._route, self._backend = scope, route, backend
        self._caller: Caller = scope["state"]["caller"]
        self._path = {name: self._stored_value(name, value) for name, value in path.items()}
        self._digest, self._has_body = hashlib.sha256(), False

    @property
    def allowed(self) -> bool:
        """True if the caller has the scope of the route."""
        return self._route.check.refusal(self._caller) is None

    def reading(self, receive: Receive) -> Receive:
        """Wrap ``receive``: hash the body of each message before the route gets the message."""

        async def digested() -> Message:
            message = await receive()
            if body := message.get("body", b""):
                self._digest.update(body)
                self._has_body = True
            return message

        return digested

    def record(self, status: int, reply: Headers) -> AuditRecord:
        """Build the audit record, once the route has run. ``status``, ``reply``: status and headers of the response."""
        headers, client = Headers(scope=self._scope), self._scope.get("client")
        query = QueryParams(self._scope["query_string"])
        location = reply.get("location", "")
        about = _JOB.search(self._path.get("job_id", "")) or _JOB.search(location)
        return AuditRecord(
            request=self.id, time=bus_time(), key=self._caller.id, key_name=self._caller.name,
            address=client[0] if client else "", method=self._route.method, route=self._route.template,
            path=self._path, query={n: v[:MAX_VALUE] for n, v in query.items() if n in self._route.query},
            status=status, job=about[1] if about is not None else "", location=location,
            replayed="idempotent-replayed" in reply, idempotency_key=headers.get("idempotency-key", "")[:255],
            body_sha256=self._digest.hexdigest() if self._has_body else "", trace=current_trace(),
        )  # fmt: skip

    def _stored_value(self, name: str, value: str) -> str:
        """Return the value of the parameter ``name`` as the audit log stores it: the name of a user as a pseudonym (''
        if pseudonyms are unavailable), any other value cut to MAX_VALUE characters."""
        if name != "user":
            return value[:MAX_VALUE]
        try:
            return self._backend.feedback.pseudonym(value) if self._backend.feedback is not None else ""
        except Unavailable:
            return ""
