"""Routes about served policy versions: show them, override the promotion gate, roll back to a checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep, JobId
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.jobs.operations import begin
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.shared.protocol.jobs import Operation

__all__ = ["Promotion", "router"]

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"])

_LARGEST = (1 << 53) - 1


class Promotion(BaseModel):
    """The version that a promotion should serve."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0, le=_LARGEST, description="Newest version: `policy_version` of the job")


class RollbackTo(BaseModel):
    """The checkpoint to roll back to."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: int = Field(ge=0, le=_LARGEST, description="Number of the checkpoint")


class Trial(BaseModel):
    """Trial of a canary version: its share of the conversations, its start and latest end (Unix seconds), and the
    feedback on both the canary version and the served version."""

    version: int
    served_version: int
    share: float
    since: float
    until: float
    needed: int = Field(description="Judged conversations of each arm that decide the trial")
    conversations: int
    reward: float | None
    served_conversations: int
    served_reward: float | None


class Versions(BaseModel):
    """The newest version, the version that is served, and the canary version."""

    object: Literal["rl.versions"] = "rl.versions"
    newest: int
    served: int
    canary: Trial | None


@router.get("/versions", response_model=Versions, dependencies=[require("jobs:read")])
async def show_versions(job: JobId, backend: BackendDep) -> Response:
    """Show the newest version, the served version, and the canary version."""
    status = (await backend.jobs.get(job)).status
    served = status.policy_version if status.served_version is None else status.served_version
    trial = None if status.canary is None else Trial(**status.canary)
    return Json(Versions(newest=status.policy_version, served=served, canary=trial))


@router.post("/promote", status_code=202, response_model=Operation, openapi_extra=body_schema(Promotion))
async def promote(
    request: Request, job: JobId, caller: Annotated[Caller, require("admin")], backend: BackendDep
) -> Response:
    """Serve the newest version regardless of its evaluation. The operation completes once the ledger records the
    promotion."""
    wanted = await read_model(request, Promotion)
    return await begin(backend, job, "promote", caller, {"version": wanted.version})


@router.post("/rollback", status_code=202, response_model=Operation, openapi_extra=body_schema(RollbackTo))
async def roll_back(
    request: Request, job: JobId, caller: Annotated[Caller, require("jobs:write")], backend: BackendDep
) -> Response:
    """Discard the updates after a checkpoint and continue training from the checkpoint, whose weights are served as a
    new version."""
    wanted = await read_model(request, RollbackTo)
    return await begin(backend, job, "rollback", caller, {"checkpoint": wanted.checkpoint})
