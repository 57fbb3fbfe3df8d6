"""Routes that accept feedback on live interactions, and report its status."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend, BackendDep, JobId
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.idempotency import token_of
from penstock.services.coordinator.api.http.replies import Json, problem_body
from penstock.services.coordinator.api.live.direct import posts_of
from penstock.services.coordinator.api.live.feedback_bodies import NDJSON, read_batch, read_post
from penstock.services.coordinator.api.live.feedback_replies import (
    BatchReply,
    ConsentReply,
    ErasureReply,
    FeedbackReply,
    FeedbackStatusReply,
    Funnel,
    RetractReply,
)
from penstock.services.coordinator.api.live.feedback_tokens import bound_post, once
from penstock.services.coordinator.api.live.own_episode import check_own_episode
from penstock.services.coordinator.api.live.user_limits import check_user, over_limit
from penstock.services.coordinator.api.own_models import check_job
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.feedback.posts import (
    ConsentBody,
    FeedbackBodies,
    FeedbackBody,
)
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.problems import HttpProblem, from_error
from penstock.shared.errors import PenstockError
from penstock.shared.protocol.live.interaction import bare_id

__all__ = ["DIRECT", "router"]

router = APIRouter(tags=["feedback"])
ADMIN = [require("feedback:admin")]
LATER = (429, 503)
"""Status codes of refusals after which a client may send the same item again."""

Sender = Annotated[Caller, require("feedback:write", in_episode=True, reach="checked")]
Judge = Annotated[Caller, require("feedback:write", in_episode=True, by_token=True, reach="checked")]
Reader = Annotated[Caller, require("feedback:write", reach="checked")]
Admin = Annotated[Caller, require("feedback:admin", reach="checked")]
FeedbackId = Annotated[str, Path(max_length=64, description="A UUID, with or without fb_")]
User = Annotated[str, Path(min_length=1, max_length=512, description="As feedback and requests name the user")]

_ONE: dict[str, Any] = {
    "status_code": 202,
    "response_model": FeedbackReply,
    "responses": {200: {"model": FeedbackReply, "description": "A dry run: valid, not stored."}, 410: {}},
    "openapi_extra": body_schema(FeedbackBody),
}
_MANY: dict[str, Any] = body_schema(FeedbackBodies)
_MANY["requestBody"]["content"][NDJSON] = {"schema": {"type": "string"}}
_GONE = {"description": "The job is over, or the target was deleted with its user's data."}
_ONE["responses"][410] = _GONE


@router.post("/v1/feedback", **_ONE)
async def post_feedback(request: Request, caller: Judge, backend: BackendDep) -> Response:
    """Post feedback: a metric's value, a whole interaction, a preference or a correction. The reply 202 means that the
    feedback is on disk.

    The target may be unknown yet; the feedback waits for it. A repeated `feedback_id` (or Idempotency-Key) has no
    second effect.
    """
    post = bound_post(await read_post(request), caller)
    service = _service(backend)
    await check_own_episode(caller, [post], service)
    await check_user(backend.limiter, caller, post.named_user, service.pseudonym)
    found = once(_answer((await service.post([post], caller=caller, key=_key(request)))[0]), caller)
    if isinstance(found, HttpProblem):
        raise found
    return Json(found, 202 if found["status"] == "accepted" else 200)


@router.post("/feedback", operation_id="post_feedback_at_root", **_ONE)
async def post_feedback_at_root(request: Request, caller: Judge, backend: BackendDep) -> Response:
    """Post feedback as with `POST /v1/feedback`, at the path that TensorZero's clients use."""
    return await post_feedback(request, caller, backend)


@router.post("/v1/feedback/batch", status_code=207, response_model=BatchReply, openapi_extra=_MANY)
async def post_batch(request: Request, caller: Sender, backend: BackendDep) -> Response:
    """Post up to 256 items as a JSON array or as JSON lines. Each item has its own result in `data[].status`."""
    read, service = await read_batch(request), _service(backend)
    posts = [post for post in read if not isinstance(post, HttpProblem)]
    await check_own_episode(caller, posts, service)
    refusals = await over_limit(backend.limiter, caller, [post.named_user for post in posts], service.pseudonym)
    admitted = [refusal or post for post, refusal in zip(posts, refusals, strict=True)]
    answers = map(_answer, await service.post(admitted, caller=caller, key=_key(request)))
    found = [post if isinstance(post, HttpProblem) else next(answers) for post in read]
    unstored = [answer for answer in found if isinstance(answer, HttpProblem) and answer.status in LATER]
    if len(unstored) == len(found):
        raise unstored[0]
    rows = [_row(place, answer, request.url.path) for place, answer in enumerate(found)]
    accepted = sum(row["problem"] is None for row in rows)
    body = {"object": "list", "data": rows, "accepted": accepted, "refused": len(rows) - accepted}
    # Not stored: in a repeated batch stored items are found to be duplicates, and the others are tried again.
    return Json(body, 207, {"Cache-Control": "no-store"})


@router.get("/v1/feedback/{feedback_id}", response_model=FeedbackStatusReply)
async def get_feedback(feedback_id: FeedbackId, caller: Reader, backend: BackendDep) -> Response:
    """Show the status of an item: received, matched, admitted, quarantined, rejected, expired, retracted, trained."""
    found = await _service(backend).status_of(feedback_id)
    await check_job(backend, caller, found["job"], _missing(feedback_id))
    return Json(found)


@router.post("/v1/feedback/{feedback_id}/retract", status_code=202, response_model=RetractReply)
async def retract(feedback_id: FeedbackId, caller: Admin, backend: BackendDep) -> Response:
    """Retract an item of feedback. An item that the job has not admitted to training loses its effect; for an admitted
    item, only the record changes."""
    service = _service(backend)
    await check_job(backend, caller, (await service.status_of(feedback_id))["job"], _missing(feedback_id))
    return Json(await service.retract(feedback_id, caller=caller), 202)


@router.get("/v1/jobs/{job_id}/feedback", response_model=Funnel, dependencies=[require("jobs:read")])
async def funnel(job: JobId, backend: BackendDep) -> Response:
    """Count the feedback of a job by metric, source and status."""
    await backend.jobs.get(job)
    return Json(await _service(backend).funnel(job))


@router.put(
    "/v1/users/{user}/consent", response_model=ConsentReply, dependencies=ADMIN, openapi_extra=body_schema(ConsentBody)
)
async def consent(request: Request, user: User, backend: BackendDep) -> Response:
    """Set the consent of a user: whether the user's interactions may be trained on, from now on."""
    body = await read_model(request, ConsentBody)
    return Json(await _service(backend).consent(user, train=body.train))


@router.delete("/v1/users/{user}/data", status_code=202, response_model=ErasureReply, dependencies=ADMIN)
async def erase(user: User, backend: BackendDep) -> Response:
    """Delete a user's interactions and the feedback about them. Weights that were trained on them stay."""
    return Json(await _service(backend).erase(user), 202)


@router.get("/v1/users/{user}/data", response_model=ErasureReply, dependencies=ADMIN)
async def erasure(user: User, backend: BackendDep) -> Response:
    """Show the progress of the deletion of a user's data."""
    return Json(await _service(backend).erasure(user))


DIRECT = posts_of(router, ("/feedback", "/v1/feedback", "/v1/feedback/batch"))
"""Routes that ``Direct`` dispatches by path."""


def _service(backend: Backend) -> FeedbackService:
    if backend.feedback is None:
        raise HttpProblem(503, "no_feedback", "this process takes no feedback", headers={"Retry-After": "1"})
    return backend.feedback


def _missing(feedback: str) -> str:
    """Return the error text for an item that does not exist. An item that the caller's key does not reach gets the same
    text."""
    return f"no feedback '{bare_id(feedback) or feedback[:80]}' was accepted here"


def _key(request: Request) -> str | None:
    header = request.headers.get("idempotency-key")
    return token_of(header) if header is not None else None


def _answer(found: dict[str, Any] | PenstockError) -> dict[str, Any] | HttpProblem:
    return from_error(found) if isinstance(found, PenstockError) else found


def _row(index: int, answer: dict[str, Any] | HttpProblem, path: str) -> dict[str, Any]:
    if isinstance(answer, HttpProblem):
        problem = problem_body(answer, path).document()
        return {"index": index, "id": None, "status": answer.status, "duplicate": False, "problem": problem}
    status = 202 if answer["status"] == "accepted" else 200
    id, duplicate = answer["feedback_id"], answer["duplicate"]
    return {"index": index, "id": id, "status": status, "duplicate": duplicate, "problem": None}
