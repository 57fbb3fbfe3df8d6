"""Routes that decide which version of a policy is served: override the promotion gate, go back to a checkpoint."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import uuid6
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend, BackendDep, JobId
from penstock.services.coordinator.api.bodies import body_schema, read_model
from penstock.services.coordinator.api.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.shared.protocol.jobs import Operation

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"])

_LARGEST = (1 << 53) - 1


class Promotion(BaseModel):
    """The version to serve."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0, le=_LARGEST, description="The newest one, as `policy_version` of the job says")


class RollbackTo(BaseModel):
    """The checkpoint to go back to."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: int = Field(ge=0, le=_LARGEST, description="Its number")


@router.post(
    "/promote", status_code=202, response_model=Operation, dependencies=[require("admin")],
    openapi_extra=body_schema(Promotion),
)  # fmt: skip
async def promote(request: Request, job: JobId, backend: BackendDep) -> Response:
    """Serve the newest version whatever was measured of it; the operation tells when the ledger says so."""
    wanted = await read_model(request, Promotion)
    return await _begin(backend, job, "promote", {"version": wanted.version})


@router.post(
    "/rollback", status_code=202, response_model=Operation, dependencies=[require("jobs:write")],
    openapi_extra=body_schema(RollbackTo),
)  # fmt: skip
async def roll_back(request: Request, job: JobId, backend: BackendDep) -> Response:
    """Give up the updates after a checkpoint and train on from it; its weights are served, under a new version."""
    wanted = await read_model(request, RollbackTo)
    return await _begin(backend, job, "rollback", {"checkpoint": wanted.checkpoint})


async def _begin(backend: Backend, job: str, kind: Literal["promote", "rollback"], args: dict[str, int]) -> Response:
    operation = Operation(id=f"op_{uuid6.uuid7().hex}", kind=kind, created_at=datetime.now(UTC), args=args)
    await backend.control.begin_operation(job, operation)
    return Json(operation, 202, {"Location": f"/v1/jobs/{job}/operations/{operation.id}"})
