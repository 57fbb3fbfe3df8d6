"""Scope that a route requires of a key: one dependency, named on every route."""

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
"""Reach of a route: the job in its path, its own check, or things that belong to no model."""


class ScopeCheck:
    """The dependency behind ``require``; gives the route its ``Caller``."""

    def __init__(self, scope: Scope, *, in_episode: bool, by_token: bool, reach: Reach) -> None:
        self.scope, self.reach = scope, reach
        self.in_episode, self.by_token = in_episode, by_token

    async def __call__(self, request: Request) -> Caller:
        """The caller.

        Raises:
            HttpProblem: 403 names the scope that the key lacks, or the models that it is for.
            NotFound: a key for some models asks for a job that does not exist.
        """
        caller = caller_of(request)
        refusal = self.refusal(caller)
        if refusal is not None:
            raise refusal
        if caller.models is not None and self.reach != "checked":
            await self._keep_to_models(request, caller)
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

    async def _keep_to_models(self, request: Request, caller: Caller) -> None:
        job = request.path_params.get("job_id")
        if job is None or self.reach == "deployment":
            raise reaches_all(caller)
        await check_job(request.app.state.backend, caller, known_job_id(job))


def require(scope: Scope, *, in_episode: bool = False, by_token: bool = False, reach: Reach = "job") -> Any:
    """A dependency that refuses keys without ``scope``: ``dependencies=[require("jobs:read")]`` of a route or router,

    or ``caller: Annotated[Caller, require("feedback:write")]`` where the route needs to know who calls. Keys of an
    episode pass only where ``in_episode``, tokens for one verdict only where ``by_token``: the route must see to it
    that they stay in theirs. Keys of some models pass where the path names a job of these (``job_id``), and where
    ``reach`` is ``checked``: the route must see to it then; anywhere else they are refused.
    """
    return Depends(ScopeCheck(scope, in_episode=in_episode, by_token=by_token, reach=reach))


def caller_of(request: Request) -> Caller:
    """Sender of the request; set before any route runs."""
    caller: Caller = request.state.caller
    return caller


def check_of(route: Any) -> ScopeCheck | None:
    """Requirement of a route."""
    found = [d.call for d in route.dependant.dependencies if isinstance(d.call, ScopeCheck)]
    return found[0] if found else None


def scope_of(route: Any) -> Scope | None:
    """The scope that a route requires."""
    check = check_of(route)
    return check.scope if check is not None else None
