"""Routes about quarantined feedback: items that deviate from the earlier feedback of their source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend, BackendDep, JobId, SomeJob
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.own_models import check_job, jobs_of
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.feedback.held import HeldFeedback
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.protocol.live.interaction import bare_id

__all__ = ["all_jobs", "router"]

router = APIRouter(prefix="/v1/jobs/{job_id}/quarantine", tags=["feedback"])
all_jobs = APIRouter(tags=["feedback"])

Item = Annotated[str, Path(max_length=64, description="Id of the feedback: a UUID, with or without fb_")]
Admin = Annotated[Caller, require("feedback:admin")]
AdminOfAll = Annotated[Caller, require("feedback:admin", reach="checked")]
After = Annotated[str, Query(max_length=64, description="last_id of the previous page")]
Limit = Annotated[int, Query(ge=1, le=100)]
_NOT_HELD: dict[int | str, dict[str, Any]] = {409: {"description": "The item is not in quarantine (any more)."}}


class HeldRow(BaseModel):
    """A quarantined item: arrival (``received``) and quarantine time (``time``) in Unix seconds, and the reason."""

    feedback_id: str
    job: str
    metric: str
    source: str
    reason: str
    received: float
    time: float


class HeldItem(HeldRow):
    """A quarantined item with its value and its target, a response or an episode."""

    value: bool | float | str | None
    target: str
    weight: float
    user: str
    revision: int


class HeldList(BaseModel):
    """One page of quarantined items, in the order of ids; ``after=last_id`` gets the next page."""

    object: Literal["list"] = "list"
    data: list[HeldRow]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class Verdict(BaseModel):
    """Reply to a decision on a quarantined item. The decision is on disk when the client gets this reply."""

    feedback_id: str
    verdict: Literal["release", "drop"]
    status: Literal["accepted"]
    duplicate: bool


@all_jobs.get("/v1/quarantine", response_model=HeldList)
async def list_all_held(
    job: SomeJob, caller: AdminOfAll, backend: BackendDep, after: After = "", limit: Limit = 20
) -> Response:
    """List the quarantined feedback of all jobs that the key may use."""
    if not job:
        return await _page(_quarantine(backend), await jobs_of(backend, caller), after, limit)
    await check_job(backend, caller, job)
    return await _page(await _held(backend, job), [job], after, limit)


@all_jobs.get("/v1/quarantine/{item}", response_model=HeldItem, responses=_NOT_HELD)
async def get_held_of_any(item: Item, caller: AdminOfAll, backend: BackendDep) -> Response:
    """Show a quarantined item and its content; its id determines the job."""
    return Json(await _quarantine(backend).show(await _job_of(backend, caller, item), item))


@all_jobs.post("/v1/quarantine/{item}/release", status_code=202, response_model=Verdict, responses=_NOT_HELD)
async def release_of_any(item: Item, caller: AdminOfAll, backend: BackendDep) -> Response:
    """Release a quarantined item, which then counts as if it arrived now. The job may already have decided on the
    response or the episode that the item is about."""
    job = await _job_of(backend, caller, item)
    return Json(await _quarantine(backend).decide(job, item, "release", caller=caller), 202)


@all_jobs.post("/v1/quarantine/{item}/drop", status_code=202, response_model=Verdict, responses=_NOT_HELD)
async def drop_of_any(item: Item, caller: AdminOfAll, backend: BackendDep) -> Response:
    """Reject a quarantined item permanently."""
    job = await _job_of(backend, caller, item)
    return Json(await _quarantine(backend).decide(job, item, "drop", caller=caller), 202)


@router.get("", response_model=HeldList)
async def list_held(job: JobId, caller: Admin, backend: BackendDep, after: After = "", limit: Limit = 20) -> Response:
    """List the quarantined feedback of a job."""
    return await _page(await _held(backend, job), [job], after, limit)


@router.get("/{item}", response_model=HeldItem, responses=_NOT_HELD)
async def get_held(job: JobId, item: Item, caller: Admin, backend: BackendDep) -> Response:
    """Show a quarantined item and its content."""
    return Json(await (await _held(backend, job)).show(job, item))


@router.post("/{item}/release", status_code=202, response_model=Verdict, responses=_NOT_HELD)
async def release(job: JobId, item: Item, caller: Admin, backend: BackendDep) -> Response:
    """Release a quarantined item, which then counts as if it arrived now. The job may already have decided on the
    response or the episode that the item is about."""
    return Json(await (await _held(backend, job)).decide(job, item, "release", caller=caller), 202)


@router.post("/{item}/drop", status_code=202, response_model=Verdict, responses=_NOT_HELD)
async def drop(job: JobId, item: Item, caller: Admin, backend: BackendDep) -> Response:
    """Reject a quarantined item permanently."""
    return Json(await (await _held(backend, job)).decide(job, item, "drop", caller=caller), 202)


async def _page(held: HeldFeedback, jobs: list[str] | None, after: str, limit: int) -> Response:
    found = await held.page(jobs, after=after, limit=limit + 1)
    page = [HeldRow(**row) for row in found[:limit]]
    first, last = (page[0].feedback_id, page[-1].feedback_id) if page else (None, None)
    return Json(HeldList(data=page, has_more=len(found) > limit, first_id=first, last_id=last))


async def _job_of(backend: Backend, caller: Caller, item: str) -> str:
    """Return the id of an item's job. Raises NotFound: no such item, or the key may not use the model of the job."""
    job: str = (await _feedback(backend).status_of(item))["job"]
    await check_job(backend, caller, job, f"no feedback '{bare_id(item) or item[:80]}' was accepted here")
    return job


async def _held(backend: Backend, job: str) -> HeldFeedback:
    await backend.jobs.get(job)
    return _quarantine(backend)


def _quarantine(backend: Backend) -> HeldFeedback:
    return _feedback(backend).held


def _feedback(backend: Backend) -> FeedbackService:
    if backend.feedback is None:
        raise HttpProblem(503, "no_feedback", "this process takes no feedback", headers={"Retry-After": "1"})
    return backend.feedback
