"""What a key must be allowed to do for a route: one dependency, named on every route."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from penstock.services.coordinator.api.auth import Caller
from penstock.services.coordinator.api.replies import HttpProblem
from penstock.shared.protocol.keys import Scope

__all__ = ["ScopeCheck", "caller_of", "require", "scope_of"]


class ScopeCheck:
    """The dependency behind ``require``; gives the route its ``Caller``."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Caller:
        """Raises HttpProblem: 403 names the scope that the key lacks."""
        caller = caller_of(request)
        if not caller.may(self.scope):
            has = ", ".join(sorted(caller.scopes)) or "none"
            raise HttpProblem(403, "missing_scope", f"this key lacks the scope '{self.scope}' (it has: {has})")
        return caller


def require(scope: Scope) -> Any:
    """A dependency that refuses keys without ``scope``: ``dependencies=[require("jobs:read")]`` of a route or router,

    or ``caller: Annotated[Caller, require("feedback:write")]`` where the route needs to know who calls.
    """
    return Depends(ScopeCheck(scope))


def caller_of(request: Request) -> Caller:
    """Who sent the request; set before any route runs."""
    caller: Caller = request.state.caller
    return caller


def scope_of(route: Any) -> Scope | None:
    """The scope that a route requires."""
    found = [d.call.scope for d in route.dependant.dependencies if isinstance(d.call, ScopeCheck)]
    return found[0] if found else None
