"""Routes of OpenAI's fine-tuning API: submit and control jobs with OpenAI's clients."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep, JobId
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.idempotency import token_of
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.finetuning.models import (
    CheckpointPage,
    EventPage,
    FineTuningJob,
    FineTuningRequest,
    JobPage,
)
from penstock.shared.protocol.jobs import DesiredState

__all__ = ["router"]

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])
READ = [require("jobs:read")]
Writer = Annotated[Caller, require("jobs:write")]
_LABEL = re.compile(r"metadata\[(.{1,64})\]")

After = Annotated[str | None, Query(max_length=64, description="Id of the last entry of the previous page")]
AfterEvent = Annotated[
    str | None, Query(pattern="^ftevent-[0-9]{1,15}$", description="Id of the last event of the previous page")
]
AfterCheckpoint = Annotated[
    str | None, Query(pattern="^ftckpt-[0-9]{1,15}$", description="Id of the last checkpoint of the previous page")
]
Limit = Annotated[int, Query(ge=1, le=100)]


@router.post("", response_model=FineTuningJob, openapi_extra=body_schema(FineTuningRequest))
async def create_fine_tuning_job(request: Request, caller: Writer, backend: BackendDep) -> Response:
    """Submit a job: reinforcement learning on an uploaded file with a grader. Every line of the files is checked first.

    `/v1/jobs` shows the job under the same id.
    """
    wanted = await read_model(request, FineTuningRequest)
    header = request.headers.get("idempotency-key")
    key = f"{caller.id}\nfine_tuning\n{token_of(header)}" if header is not None else ""
    job = await backend.fine_tuning.create(wanted, key=key)
    return Json(job, 200, {"Location": f"/v1/fine_tuning/jobs/{job.id}"})


@router.get("", response_model=JobPage)
async def list_fine_tuning_jobs(
    request: Request,
    caller: Annotated[Caller, require("jobs:read", reach="checked")],
    backend: BackendDep,
    after: After = None,
    limit: Limit = 20,
) -> Response:
    """List the jobs that this API submitted, newest first. ``metadata[KEY]=VALUE`` selects jobs with that label."""
    labels = {m[1]: value for key, value in request.query_params.multi_items() if (m := _LABEL.fullmatch(key))}
    return Json(await backend.fine_tuning.page(after=after, limit=limit, labels=labels, models=caller.models))


@router.get("/{job_id}", response_model=FineTuningJob, dependencies=READ)
async def get_fine_tuning_job(job: JobId, backend: BackendDep) -> Response:
    """Show a job."""
    service = backend.fine_tuning
    return Json(service.shown(await service.get(job)))


@router.post("/{job_id}/cancel", response_model=FineTuningJob)
async def cancel_fine_tuning_job(job: JobId, caller: Writer, backend: BackendDep) -> Response:
    """Request that a job ends; it drains and writes a checkpoint first. Safe to repeat."""
    return await _steer(job, caller, backend, "cancelled")


@router.post("/{job_id}/pause", response_model=FineTuningJob)
async def pause_fine_tuning_job(job: JobId, caller: Writer, backend: BackendDep) -> Response:
    """Request that a job stops after its current update. Safe to repeat."""
    return await _steer(job, caller, backend, "paused")


@router.post("/{job_id}/resume", response_model=FineTuningJob)
async def resume_fine_tuning_job(job: JobId, caller: Writer, backend: BackendDep) -> Response:
    """Resume a paused job. Safe to repeat."""
    return await _steer(job, caller, backend, "running")


@router.get("/{job_id}/events", response_model=EventPage, dependencies=READ)
async def list_fine_tuning_events(
    job: JobId, backend: BackendDep, after: AfterEvent = None, limit: Limit = 20
) -> Response:
    """List the events of a job, newest first."""
    return Json(await backend.fine_tuning.events(job, after=after, limit=limit))


@router.get("/{job_id}/checkpoints", response_model=CheckpointPage, dependencies=READ)
async def list_fine_tuning_checkpoints(
    job: JobId, backend: BackendDep, after: AfterCheckpoint = None, limit: Limit = 10
) -> Response:
    """List the checkpoints of a job, newest first; each can be the `model` of another job."""
    return Json(await backend.fine_tuning.checkpoints(job, after=after, limit=limit))


async def _steer(job: str, caller: Caller, backend: BackendDep, state: DesiredState) -> Response:
    service = backend.fine_tuning
    await service.get(job)
    return Json(service.shown(await backend.steering.set_desired(job, state, by=caller.id)))
