"""The versions of a model: which ones there are, and promoting and rolling back a job by the name of its model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep
from penstock.services.coordinator.api.auth import Caller
from penstock.services.coordinator.api.bodies import body_schema, read_model
from penstock.services.coordinator.api.inference import served_of
from penstock.services.coordinator.api.own_episode import check_model
from penstock.services.coordinator.api.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.api.versions import Promotion, begin
from penstock.shared.errors import NotFound
from penstock.shared.protocol.jobs import Operation

__all__ = ["router"]

router = APIRouter(prefix="/v1/models/{model}", tags=["inference"])

ModelName = Annotated[str, Path(max_length=256, description="Name or id of a job")]


class RollbackToVersion(BaseModel):
    """The policy version to go back to."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0, lt=1 << 53, description="One that a checkpoint has")


class ModelVersion(BaseModel):
    """A version that is served, or that a checkpoint has, so that the model can go back to it."""

    version: int
    served: bool
    newest: bool
    checkpoint: int | None
    """Number of its newest checkpoint."""
    created: int | None
    """When that was taken, in Unix seconds."""


class ModelVersions(BaseModel):
    """Newest first."""

    object: str = "list"
    data: list[ModelVersion]


@router.get("/versions", response_model=ModelVersions)
async def list_versions(
    model: ModelName, caller: Annotated[Caller, require("models:read")], backend: BackendDep
) -> Response:
    """List the versions of a model: the newest, the one that is served, and those of its checkpoints."""
    served = served_of(backend, model)
    check_model(caller, served.name, served.job)
    newest = (await backend.control.get(served.job)).status.policy_version
    kept = {row["version"]: row for row in await backend.control.checkpoints(served.job) if row["available"]}
    return Json(ModelVersions(data=[
        ModelVersion(
            version=version, served=version == served.version, newest=version == newest,
            checkpoint=kept[version]["number"] if version in kept else None,
            created=int(kept[version]["time"]) if version in kept else None,
        )
        for version in sorted({newest, served.version, *kept}, reverse=True)
    ]))  # fmt: skip


@router.post(
    "/promote", status_code=202, response_model=Operation, dependencies=[require("admin")],
    openapi_extra=body_schema(Promotion),
)  # fmt: skip
async def promote_model(request: Request, model: ModelName, backend: BackendDep) -> Response:
    """Serve the model's newest version whatever was measured of it."""
    wanted = await read_model(request, Promotion)
    return await begin(backend, served_of(backend, model).job, "promote", {"version": wanted.version})


@router.post(
    "/rollback", status_code=202, response_model=Operation, dependencies=[require("jobs:write")],
    openapi_extra=body_schema(RollbackToVersion),
)  # fmt: skip
async def roll_back_model(request: Request, model: ModelName, backend: BackendDep) -> Response:
    """Give up the updates after a version that a checkpoint has, and train on from it."""
    version, job = (await read_model(request, RollbackToVersion)).version, served_of(backend, model).job
    rows = await backend.control.checkpoints(job)
    numbers = [row["number"] for row in rows if row["version"] == version]
    if not numbers:
        known = ", ".join(str(row["version"]) for row in rows) or "none"
        raise NotFound(f"no checkpoint has version {version} of '{model}'; there are: {known}")
    return await begin(backend, job, "rollback", {"checkpoint": numbers[-1]})
