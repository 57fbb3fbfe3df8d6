"""What a key must be allowed to do for a route: one dependency, named on every route."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from penstock.services.coordinator.api.auth import Caller
from penstock.services.coordinator.api.replies import HttpProblem
from penstock.shared.protocol.keys import Scope

__all__ = ["ScopeCheck", "caller_of", "check_of", "require", "scope_of"]


class ScopeCheck:
    """The dependency behind ``require``; gives the route its ``Caller``."""

    def __init__(self, scope: Scope, *, in_episode: bool = False, by_token: bool = False) -> None:
        self.scope = scope
        self.in_episode, self.by_token = in_episode, by_token

    async def __call__(self, request: Request) -> Caller:
        """Raises HttpProblem: 403 names the scope that the key lacks."""
        caller = caller_of(request)
        refusal = self.refusal(caller)
        if refusal is not None:
            raise refusal
        return caller

    def refusal(self, caller: Caller) -> HttpProblem | None:
        """Why a caller may not, None where it may."""
        if caller.episode and not self.in_episode:
            detail = f"this key is for requests and feedback in episode '{caller.episode}' and for nothing else"
            return HttpProblem(403, "episode_key", detail)
        if caller.token is not None and not self.by_token:
            detail = "this token is for one verdict, at /v1/feedback, and nothing else"
            return HttpProblem(403, "feedback_token", detail)
        if not caller.may(self.scope):
            has = ", ".join(sorted(caller.scopes)) or "none"
            return HttpProblem(403, "missing_scope", f"this key lacks the scope '{self.scope}' (it has: {has})")
        return None


def require(scope: Scope, *, in_episode: bool = False, by_token: bool = False) -> Any:
    """A dependency that refuses keys without ``scope``: ``dependencies=[require("jobs:read")]`` of a route or router,

    or ``caller: Annotated[Caller, require("feedback:write")]`` where the route needs to know who calls. Keys of an
    episode pass only where ``in_episode``, tokens for one verdict only where ``by_token``: the route must see to it
    that they stay in theirs.
    """
    return Depends(ScopeCheck(scope, in_episode=in_episode, by_token=by_token))


def caller_of(request: Request) -> Caller:
    """Who sent the request; set before any route runs."""
    caller: Caller = request.state.caller
    return caller


def check_of(route: Any) -> ScopeCheck | None:
    """What a route requires."""
    found = [d.call for d in route.dependant.dependencies if isinstance(d.call, ScopeCheck)]
    return found[0] if found else None


def scope_of(route: Any) -> Scope | None:
    """The scope that a route requires."""
    check = check_of(route)
    return check.scope if check is not None else None
