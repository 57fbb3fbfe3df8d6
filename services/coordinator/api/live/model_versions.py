"""Routes about the versions of a model: list them, and promote and roll back a job by the name of its model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend, BackendDep
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.jobs.operations import begin
from penstock.services.coordinator.api.jobs.versions import Promotion
from penstock.services.coordinator.api.live.inference import served_of
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.shared.errors import NotFound
from penstock.shared.protocol.jobs import Operation

__all__ = ["router"]

router = APIRouter(prefix="/v1/models/{model}", tags=["inference"])

ModelName = Annotated[str, Path(max_length=256, description="Name or id of a job")]


class RollbackToVersion(BaseModel):
    """The policy version to roll back to."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0, lt=1 << 53, description="Version of a checkpoint")


class Kept(BaseModel):
    """The newest checkpoint of a policy version."""

    number: int
    time: float
    """Time of the checkpoint, in Unix seconds."""
    available: bool
    """True if the checkpoint's files are on the coordinator's host."""


class ModelVersion(BaseModel):
    """A policy version: the newest, the served, or a version with a checkpoint, to which the model can roll back."""

    version: int
    served: bool
    newest: bool
    checkpoint: Kept | None


class ModelVersions(BaseModel):
    """Versions of a model, newest first."""

    object: str = "list"
    data: list[ModelVersion]


@router.get("/versions", response_model=ModelVersions)
async def list_versions(
    model: ModelName, caller: Annotated[Caller, require("models:read", reach="checked")], backend: BackendDep
) -> Response:
    """List the policy versions of a model: the newest, the served, and every version with a checkpoint."""
    served = served_of(backend, model, caller)
    trained = (await backend.jobs.get(served.job)).status.policy_version
    kept = await _checkpoints_of(backend, served.job)
    newest = max(trained, served.version, *kept)
    versions = sorted({newest, served.version, *kept}, reverse=True)
    return Json(ModelVersions(data=[
        ModelVersion(
            version=version, served=version == served.version, newest=version == newest,
            checkpoint=kept.get(version),
        )
        for version in versions
    ]))  # fmt: skip


@router.post("/promote", status_code=202, response_model=Operation, openapi_extra=body_schema(Promotion))
async def promote_model(
    request: Request, model: ModelName, caller: Annotated[Caller, require("admin")], backend: BackendDep
) -> Response:
    """Serve the model's newest version regardless of its evaluation."""
    wanted = await read_model(request, Promotion)
    return await begin(backend, served_of(backend, model, caller).job, "promote", caller, {"version": wanted.version})


@router.post("/rollback", status_code=202, response_model=Operation, openapi_extra=body_schema(RollbackToVersion))
async def roll_back_model(
    request: Request,
    model: ModelName,
    caller: Annotated[Caller, require("jobs:write", reach="checked")],
    backend: BackendDep,
) -> Response:
    """Discard the updates after a version with a checkpoint, and continue training from it."""
    version, served = (await read_model(request, RollbackToVersion)).version, served_of(backend, model, caller)
    kept = await _checkpoints_of(backend, served.job)
    if version not in kept:
        known = ", ".join(map(str, kept)) or "none"
        raise NotFound(f"no checkpoint has version {version} of '{model}'; there are: {known}")
    return await begin(backend, served.job, "rollback", caller, {"checkpoint": kept[version].number})


async def _checkpoints_of(backend: Backend, job: str) -> dict[int, Kept]:
    """Return the newest checkpoint of each policy version of a job, by version."""
    return {row["version"]: Kept.model_validate(row) for row in await backend.checkpoints.rows(job)}
