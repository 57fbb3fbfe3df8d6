"""Route that changes the number of workers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep, JobId
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.jobs.operations import begin
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.errors import Unavailable
from penstock.shared.protocol.jobs import Operation
from penstock.shared.protocol.scaling import Pool

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"])
MAX_REPLICAS = 64


class ScaleBody(BaseModel):
    """Wanted number of workers, which serve every job of the deployment."""

    model_config = ConfigDict(extra="forbid")

    pool: Pool
    replicas: int = Field(ge=0, le=MAX_REPLICAS)


@router.post("/scale", status_code=202, response_model=Operation, openapi_extra=body_schema(ScaleBody))
async def scale(
    request: Request,
    job: JobId,
    caller: Annotated[Caller, require("jobs:write", reach="deployment")],
    backend: BackendDep,
) -> Response:
    """Start or stop workers while the job runs. Stopping workers finish their current work.

    409 `not_supervised` if `penstock up` does not run the deployment: scale it with the tool that runs the containers.
    """
    body = await read_model(request, ScaleBody)
    await backend.jobs.get(job)
    try:
        await backend.scaling.pool(body.pool)
    except Unavailable:
        raise HttpProblem(
            409,
            "not_supervised",
            f"nobody here starts processes by request: scale the service '{body.pool}' where it runs "
            f"(docker compose up --scale {body.pool}={body.replicas}, kubectl scale); jobs take the workers that come",
        ) from None
    return await begin(backend, job, "scale", caller, body.model_dump())
