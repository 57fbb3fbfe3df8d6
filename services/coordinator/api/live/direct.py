"""Fast dispatch of routes that are called thousands of times a second: finds a route by its path, without trying all
routes in turn.

The routes stay declared with the others, for the OpenAPI document and for unsupported methods. This dispatch skips
matching and dependency injection, which take longer than the work itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.services.coordinator.api.access import Backend
from penstock.services.coordinator.api.http.replies import problem_response
from penstock.services.coordinator.api.scopes import ScopeCheck, check_of
from penstock.services.coordinator.problems import from_error
from penstock.shared.errors import PenstockError

__all__ = ["Direct", "posts_of"]


@dataclass(frozen=True)
class _Post:
    """POST route that ``Direct`` serves; metrics count its requests under ``path``."""

    path: str
    endpoint: Callable[..., Awaitable[Response]]
    check: ScopeCheck


def posts_of(router: APIRouter, paths: Iterable[str]) -> dict[str, _Post]:
    """Return the POST routes of ``router`` at ``paths``, by path.

    All require a scope, and their endpoints take (request, caller, backend).
    """
    wanted, found = set(paths), dict[str, _Post]()
    for route in router.routes:
        if isinstance(route, APIRoute) and route.path in wanted and "POST" in (route.methods or ()):
            check = check_of(route)
            assert check is not None, f"{route.path} requires no scope"
            found[route.path] = _Post(route.path, route.endpoint, check)
    return found


class Direct:
    """Innermost ASGI middleware: serves the routes in ``posts`` and passes other requests on."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Any], backend: Backend) -> None:
        self.app = app
        self.posts: Mapping[str, _Post] = posts
        self.backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        post = self.posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if post is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = post
        request = Request(scope, receive)
        try:
            caller = await post.check(request)
            response = await post.endpoint(request, caller=caller, backend=self.backend)
        except ClientDisconnect:
            return
        except PenstockError as error:
            response = problem_response(from_error(error), scope["path"])
        await response(scope, receive, send)
