"""Routes that create, list and revoke API keys."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend, BackendDep
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.ratelimit import parse_rate
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.errors import NotFound
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.keys import KeyRecord, Scope

__all__ = ["router"]

router = APIRouter(prefix="/v1/keys", tags=["keys"], dependencies=[require("admin")])

KeyId = Annotated[str, Path(max_length=64, description="Id of a key: 16 hex digits")]
LONGEST_S = 10 * 365 * 86400
ModelName = Annotated[str, StringConstraints(pattern="^[a-z0-9][a-z0-9._-]{0,62}$")]
ModuleName = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z_][\w.]{0,127})$")]
_JOB_ID = re.compile("job_[0-9a-f]{32}")


class KeyRequest(BaseModel):
    """A new key. It expires ``expires_in_s`` seconds from now, or at ``expires_at``, or never."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=64, description="Free text")
    scopes: list[Scope] = Field(min_length=1, max_length=16)
    expires_in_s: float | None = Field(None, gt=0, le=LONGEST_S)
    expires_at: AwareDatetime | None = None
    rate_limit: str | None = Field(None, max_length=64, description="Like 600/minute; default: the deployment's")
    models: list[ModelName] | None = Field(
        None, min_length=1, max_length=64, description="Names or ids of jobs; the key reaches no others"
    )
    max_weight: float = Field(1.0, ge=0, le=1, description="Maximum weight of its feedback")
    code_modules: list[ModuleName] | None = Field(
        None, max_length=64, description="With jobs:code: modules whose functions its jobs may name; `*`: all"
    )

    @field_validator("rate_limit")
    @classmethod
    def _is_a_rate(cls, value: str | None) -> str | None:
        if value is not None:
            parse_rate(value)
        return value

    @model_validator(mode="after")
    def _one_end(self) -> KeyRequest:
        if self.expires_in_s is not None and self.expires_at is not None:
            raise ValueError("give expires_in_s or expires_at, not both")
        return self

    @model_validator(mode="after")
    def _reaches_no_other_model(self) -> KeyRequest:
        if self.models is not None and "admin" in self.scopes:
            raise ValueError("models: a key for some models cannot have the scope admin, which reaches others")
        return self

    @property
    def end(self) -> datetime | None:
        """Time at which the key expires; None for never."""
        if self.expires_in_s is None:
            return self.expires_at
        return bus_datetime() + timedelta(seconds=self.expires_in_s)


class NewKey(KeyRecord):
    """A new key; ``key`` is not shown again."""

    key: str
    warnings: list[str] = Field([], description="Names that the key reaches once such a job exists")


class KeyList(BaseModel):
    """All keys that are not revoked, oldest first."""

    object: Literal["list"] = "list"
    data: list[KeyRecord]
    has_more: bool = False


@router.post("", status_code=201, response_model=NewKey, openapi_extra=body_schema(KeyRequest))
async def create_key(request: Request, backend: BackendDep) -> Response:
    """Create a key. Only this reply contains its text; a repeated request creates another key."""
    wanted = await read_model(request, KeyRequest)
    warnings = await _unreached(backend, wanted.models or [])
    scopes = sorted(set(wanted.scopes))
    key, text = await backend.keys.create(
        wanted.name, scopes, expires_at=wanted.end, rate_limit=wanted.rate_limit, models=wanted.models,
        max_weight=wanted.max_weight, code_modules=wanted.code_modules,
    )  # fmt: skip
    body = NewKey(**key.shown().model_dump(), key=text, warnings=warnings)
    return Json(body, 201, {"Location": f"/v1/keys/{key.id}", "Cache-Control": "no-store"})


async def _unreached(backend: Backend, models: list[str]) -> list[str]:
    """Return a warning for each name in ``models`` that no job has yet. An unknown job id is an error, because no
    future job will get that id.

    Raises:
        HttpProblem: 422 an entry has the form of a job id, and no job has this id.
    """
    if not models:
        return []
    jobs = (await backend.jobs.index()).of_models(frozenset(models))
    known = {name for job in jobs for name in (job.id, job.name)}
    flaws = [
        Flaw(pointer=f"/models/{place}", detail=f"there is no job '{name}', and none will get this id")
        for place, name in enumerate(models)
        if name not in known and _JOB_ID.fullmatch(name)
    ]
    if flaws:
        detail = f"the body is not valid: {flaws[0].pointer}: {flaws[0].detail}"
        raise HttpProblem(422, "invalid_body", detail, errors=flaws)
    return [f"models: there is no job named '{name}' yet" for name in models if name not in known]


@router.get("", response_model=KeyList)
async def list_keys(backend: BackendDep) -> Response:
    """List the keys: their scopes and expiry, never their texts."""
    return Json(KeyList(data=[key.shown() for key in await backend.keys.list_all()]))


@router.get("/{key_id}", response_model=KeyRecord)
async def get_key(key_id: KeyId, backend: BackendDep) -> Response:
    """Show a key."""
    found = [key for key in await backend.keys.list_all() if key.id == key_id]
    if not found:
        raise NotFound(f"no key '{key_id}'")
    return Json(found[0].shown())


@router.delete("/{key_id}", status_code=204)
async def revoke_key(key_id: KeyId, backend: BackendDep) -> Response:
    """Revoke a key at once; other replicas of the API may accept it for one more second."""
    known = {key.id for key in await backend.keys.list_all()}
    if key_id not in known:
        raise NotFound(f"no key '{key_id}'")
    await backend.keys.delete(key_id)
    backend.ring.forget(key_id)
    return Response(status_code=204)
