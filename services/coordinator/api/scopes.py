"""Scope that a route requires of a key, declared as one dependency on every route."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Depends, Request

from penstock.services.coordinator.api.access import known_job_id
from penstock.services.coordinator.api.own_models import check_job, reaches_all
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.protocol.keys import Scope

__all__ = ["Reach", "ScopeCheck", "caller_of", "check_of", "require", "scope_of"]

Reach = Literal["job", "checked", "deployment"]
"""How a route treats keys that are restricted to some models: ``job`` checks the job in the path, ``checked`` leaves
the check to the route, and ``deployment`` refuses such keys."""


class ScopeCheck:
    """FastAPI dependency that ``require`` returns: checks the key, and gives the route its ``Caller``."""

    def __init__(self, scope: Scope, *, in_episode: bool, by_token: bool, reach: Reach) -> None:
        self.scope, self.reach = scope, reach
        self.in_episode, self.by_token = in_episode, by_token

    async def __call__(self, request: Request) -> Caller:
        """Return the caller.

        Raises:
            HttpProblem: 403 the key lacks the scope, or is for other models; the text names the scope or the models.
            NotFound: the job does not exist or belongs to a model that the key does not reach.
        """
        caller = caller_of(request)
        refusal = self.refusal(caller)
        if refusal is not None:
            raise refusal
        if caller.models is not None and self.reach != "checked":
            await self._keep_to_models(request, caller)
        return caller

    def refusal(self, caller: Caller) -> HttpProblem | None:
        """Return the error for a key whose kind or scopes the route does not accept; None for an accepted key."""
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

    async def _keep_to_models(self, request: Request, caller: Caller) -> None:
        job = request.path_params.get("job_id")
        if job is None or self.reach == "deployment":
            raise reaches_all(caller)
        await check_job(request.app.state.backend, caller, known_job_id(job))


def require(scope: Scope, *, in_episode: bool = False, by_token: bool = False, reach: Reach = "job") -> Any:
    """Return a dependency that refuses keys without ``scope``.

    Use it as ``dependencies=[require("jobs:read")]`` of a route or router, or as ``caller: Annotated[Caller,
    require("feedback:write")]`` where the route needs the caller. Episode keys pass only with ``in_episode``, feedback
    tokens only with ``by_token``; the route must then restrict them to their episode or verdict. Keys that are
    restricted to some models depend on ``reach``: with ``job`` they pass if the path names one of their jobs
    (``job_id``), with ``checked`` they pass and the route must check them, with ``deployment`` they are refused.
    """
    return Depends(ScopeCheck(scope, in_episode=in_episode, by_token=by_token, reach=reach))


def caller_of(request: Request) -> Caller:
    """Return the sender of the request, which the guard sets before any route runs."""
    caller: Caller = request.state.caller
    return caller


def check_of(route: Any) -> ScopeCheck | None:
    """Return the scope check of a route, or None."""
    found = [d.call for d in route.dependant.dependencies if isinstance(d.call, ScopeCheck)]
    return found[0] if found else None


def scope_of(route: Any) -> Scope | None:
    """Return the scope that a route requires, or None."""
    check = check_of(route)
    return check.scope if check is not None else None
