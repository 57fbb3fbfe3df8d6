"""Feedback tokens: the route that creates them, and checks of posts that are made with them. A token allows one post of
one metric's value."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import uuid6
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.feedback.posts import EpisodeId, InferenceId, Metric, MetricName
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.live.feedback_tokens import TOKENS, FeedbackGrant
from penstock.shared.protocol.live.interaction import bare_id

__all__ = ["DEFAULT_S", "LONGEST_S", "SHORTEST_S", "bound_post", "once", "router"]

Row = dict[str, Any]

router = APIRouter(tags=["feedback"])
SHORTEST_S, DEFAULT_S, LONGEST_S = 1.0, 86400.0, 30 * 86400.0
"""Shortest, default and longest lifetime of a token, in seconds."""


class FeedbackTokenRequest(BaseModel):
    """Request for a token: the metric of the feedback that the token allows, and the response or the episode that the
    feedback is about."""

    model_config = ConfigDict(extra="forbid")

    metric_name: MetricName
    inference_id: InferenceId | None = None
    episode_id: EpisodeId | None = None
    expires_in_s: float = Field(DEFAULT_S, ge=SHORTEST_S, le=LONGEST_S)

    @model_validator(mode="after")
    def _one_target(self) -> FeedbackTokenRequest:
        if (self.inference_id is None) == (self.episode_id is None):
            raise ValueError("a verdict is about an inference_id or about an episode_id: give one of them")
        return self


class FeedbackToken(BaseModel):
    """A token; ``token`` is only in this reply. ``feedback_id`` is the id of the item that the token's bearer will
    post."""

    object: Literal["rl.feedback_token"] = "rl.feedback_token"
    token: str
    feedback_id: str
    metric_name: str
    url: str
    expires_at: datetime


@router.post(
    "/v1/feedback/tokens",
    status_code=201,
    response_model=FeedbackToken,
    openapi_extra=body_schema(FeedbackTokenRequest),
)
async def make_token(
    request: Request, caller: Annotated[Caller, require("feedback:write", reach="checked")], backend: BackendDep
) -> Response:
    """Create a token that allows one item of feedback, for a web page that should hold no key.

    Its bearer may post one value of this metric about this target to `/v1/feedback`, once, until the token or the key
    that created it expires. The token is not stored.
    """
    body = await read_model(request, FeedbackTokenRequest)
    expires = int(bus_time() + body.expires_in_s)
    grant = FeedbackGrant(
        id=str(uuid6.uuid7()), target=bare_id(body.inference_id or body.episode_id or "") or "",
        by_episode=body.episode_id is not None, metric=body.metric_name, maker=caller.id, expires=expires,
    )  # fmt: skip
    base: Any = request.base_url
    token = FeedbackToken(
        token=TOKENS.write(grant, await backend.keys.secret()), feedback_id=grant.id,
        metric_name=grant.metric, url=f"{str(base).rstrip('/')}/v1/feedback",
        expires_at=datetime.fromtimestamp(expires, UTC),
    )  # fmt: skip
    return Json(token, 201, {"Cache-Control": "no-store"})


def bound_post(post: Any, caller: Caller) -> Any:
    """Return ``post`` with the feedback id of the sender's token; for a sender with a key, return it unchanged.

    Raises:
        HttpProblem: 403 the token does not allow this post.
    """
    grant = caller.token
    if grant is None:
        return post
    if not isinstance(post, Metric):
        raise _other("it is for the value of a metric")
    named = getattr(post, "episode_id" if grant.by_episode else "inference_id", None)
    if named is None or bare_id(named) != grant.target:
        raise _other(f"it is about {'episode' if grant.by_episode else 'response'} '{grant.target}'")
    if post.metric_name != grant.metric:
        raise _other(f"it is for the metric '{grant.metric}'")
    if post.final or post.revision or post.weight != 1 or post.turn != -1:
        raise _other("final, revision, weight and turn are not for its bearer to say")
    return post.model_copy(update={"feedback_id": grant.id})


def once(found: Row | HttpProblem, caller: Caller) -> Row | HttpProblem:
    """Return ``found``, which is the receipt or the refusal of a post. If the sender's token was used before, return an
    HttpProblem (409) instead."""
    if caller.token is None:
        return found
    again = found.code == "feedback_id_reused" if isinstance(found, HttpProblem) else bool(found["duplicate"])
    if not again:
        return found
    return HttpProblem(409, "token_used", "this token was used: its verdict is on disk, and it is for one only")


def _other(why: str) -> HttpProblem:
    return HttpProblem(403, "other_verdict", f"this token is for one verdict: {why}")
