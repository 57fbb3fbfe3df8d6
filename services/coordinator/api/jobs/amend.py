"""Routes that change a job file while the job runs, extend an ended job, and start operations on a job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep, JobId
from penstock.services.coordinator.api.http.bodies import body_schema, job_pointer, read_model, read_object
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.jobs.operations import begin
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.config.explain import explain
from penstock.shared.config.jobs.amendable import (
    AMENDABLE,
    BACKEND,
    changed_keys,
    is_amendable,
    leaves,
    ranges_of,
    value_at,
    with_patch,
)
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyJob, job_model
from penstock.shared.errors import NotFound
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord, Operation

__all__ = ["router"]

MERGE_PATCH = "application/merge-patch+json"

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"])
Writer = Annotated[Caller, require("jobs:write")]


class Amended(JobRecord):
    """Job after a change of its file."""

    applies_at_step: int | None = Field(
        None,
        description="First update, counted from 1, to which the change applies; null until a leader applies it, "
        "and where it changes nothing of the training. What was drawn before keeps its temperature",
    )


class Patch(BaseModel):
    """Part of a job file, as a JSON merge patch (RFC 7396); null resets a key to its default."""

    model_config = {"extra": "forbid", "json_schema_extra": {"minProperties": 1}}

    train: dict[str, Any] = Field({}, description="max_updates")
    checkpoint: dict[str, Any] = Field({}, description="every, keep")
    limits: dict[str, Any] = Field({}, description="byte_budget, timeout_s")
    optimizer: dict[str, Any] = Field({}, description="learning_rate")
    algorithm: dict[str, Any] = Field({}, description="kl.coef, unless it is adaptive")
    sampling: dict[str, Any] = Field({}, description="temperature")
    backend: dict[str, Any] = Field(
        {}, description="any key; another `type` replaces the section. The trainer continues from a checkpoint"
    )
    metadata: dict[str, str | None] = {}


class Amendable(BaseModel):
    """Setting that may change while the job runs, with its current value and range."""

    key: str
    value: float | int | None
    type: Literal["integer", "number"]
    minimum: float | None = Field(description="Inclusive minimum")
    above: float | None = Field(description="Exclusive minimum")
    optional: bool = Field(description="null is a valid value")
    description: str


class AmendableList(BaseModel):
    """Settings that may change while the job runs."""

    object: Literal["list"] = "list"
    data: list[Amendable]
    has_more: bool = False


@router.get("/amendable", response_model=AmendableList, dependencies=[require("jobs:read")])
async def amendable(job: JobId, backend: BackendDep) -> Response:
    """List the settings that may change while the job runs, with values and ranges. The list omits `backend` and
    `metadata`, which may change, too."""
    spec = (await backend.jobs.get(job)).spec
    return Json({"object": "list", "data": ranges_of(job_model(spec).model_validate(spec)), "has_more": False})


@router.patch(
    "",
    status_code=202,
    response_model=Amended,
    responses={412: {"description": "The job was changed since the ETag that If-Match names."}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {t: {"schema": Patch.model_json_schema()} for t in ("application/json", MERGE_PATCH)},
        }
    },
)
async def amend(
    *,
    request: Request,
    job: JobId,
    caller: Writer,
    backend: BackendDep,
    wait: Annotated[float, Query(ge=0, le=60, description="Seconds to wait until a leader applies it")] = 5,
    if_match: Annotated[str, Header()] = "",
) -> Response:
    """Change a job file while the job runs.

    Amendable keys: `train.max_updates`, `checkpoint.every`, `checkpoint.keep`, `limits.*`, `optimizer.learning_rate`,
    `algorithm.kl.coef`, `sampling.temperature` and `metadata`. A change applies from the next sealed batch; sealed
    batches keep their settings, so that replays stay exact. A new temperature applies to completions sampled from then
    on; each completion is trained at the temperature at which it was sampled. `backend` applies after the current
    update: the trainer writes a checkpoint and resumes from it with the new backend, including the optimizer state.
    `If-Match` fails if the job file was changed since the `ETag` was read.
    """
    patch = await read_object(request, patch_too=True)

    def edit(record: JobRecord) -> AnyJob:
        _check_match(if_match, record)
        return amended(record, patch)

    record = await backend.steering.amend(job, edit, by=caller.id)
    generation = record.generation
    record = await backend.feeds.until(
        record, lambda now: now.status.observed_generation >= generation or now.status.phase in TERMINAL_PHASES, wait
    )
    followed = record.status.observed_generation >= generation
    step = record.status.applies_at_step if followed else None
    reply = Amended(**record.model_dump(), applies_at_step=step)
    return Json(reply, 202, {"ETag": f'"{record.revision}"'})


def amended(record: JobRecord, patch: dict[str, Any]) -> AnyJob:
    """Return the job file of ``record`` with ``patch`` applied.

    Raises:
        HttpProblem: 422 `immutable_field` or `invalid_job`, with a pointer to each flaw.
    """
    model = job_model(record.spec)
    before = model.model_validate(record.spec)
    known = before.model_dump(mode="json")
    fixed = [
        key
        for key, value in leaves(patch)
        if not is_amendable(before, key) and value_at(known, key) not in (None, value)
    ]
    if fixed:
        raise _immutable(fixed)
    raw = _without_old_backend(with_patch(record.spec, patch), patch, known)
    try:
        after = model.model_validate(raw)
    except ValidationError as error:
        flaws = [Flaw(pointer=job_pointer(raw, key), detail=detail) for key, detail in explain(model, error)]
        first = f"{flaws[0].pointer or '/'}: {flaws[0].detail}"
        raise HttpProblem(422, "invalid_job", f"the job would not be valid: {first}", errors=flaws) from None
    fixed = [key for key in changed_keys(before, after) if not is_amendable(before, key)]
    if fixed:
        raise _immutable(fixed)
    _check_schedule(after)
    return after


def _without_old_backend(raw: dict[str, Any], patch: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return ``raw`` without the keys of the old backend if ``patch`` selects another type of backend; otherwise return
    ``raw``."""
    section = patch.get(BACKEND)
    if not isinstance(section, dict) or section.get("type") in (None, value_at(known, f"{BACKEND}.type")):
        return raw
    return {**raw, BACKEND: with_patch({}, section)}


def _check_schedule(job: AnyJob) -> None:
    if not isinstance(job, JobConfig) or job.train.max_updates is not None:
        return
    critic = job.algorithm.critic
    for schedule in (job.optimizer.schedule, "constant" if critic is None else critic.optimizer.schedule):
        if schedule != "constant":
            detail = f"the schedule '{schedule}' decays over the run and needs it"
            flaw = Flaw(pointer="/train/max_updates", detail=detail)
            raise HttpProblem(422, "invalid_job", f"/train/max_updates: {detail}", errors=[flaw])


def _immutable(keys: list[str]) -> HttpProblem:
    flaws = [Flaw(pointer="/" + key.replace(".", "/"), detail="cannot change while the job exists") for key in keys]
    may = ", ".join((*AMENDABLE, BACKEND, "metadata"))
    unless = "algorithm.kl.coef unless it is adaptive, backend unless there is online.promotion"
    detail = f"{', '.join(keys)} cannot change any more; what may: {may} ({unless})"
    return HttpProblem(422, "immutable_field", detail, errors=flaws)


def _check_match(if_match: str, record: JobRecord) -> None:
    """Raise HttpProblem 412 if the header ``If-Match`` has ETags, but none of them belongs to the current job file. An
    ETag stays valid until the job file changes."""
    if not if_match or if_match.strip() == "*":
        return
    tags = [tag.strip().strip('"') for tag in if_match.split(",")]
    known = [int(tag) for tag in tags if tag.isascii() and tag.isdigit() and len(tag) < 19]
    if not any(record.changed_from < revision <= record.revision for revision in known):
        raise HttpProblem(
            412,
            "precondition_failed",
            f"the job was changed since (it is at generation {record.generation}): read it again",
            headers={"ETag": f'"{record.revision}"'},
        )


class Extension(BaseModel):
    """New length of a job that has ended."""

    model_config = ConfigDict(extra="forbid")

    max_updates: int = Field(ge=1, lt=1 << 53, description="Total policy updates, including the finished ones")


class ExtendedJob(JobRecord):
    """Job after it was extended."""

    notes: list[str]
    """Side effects of the new length on settings of the job, such as the learning rate."""


@router.post(
    "/extend",
    status_code=202,
    response_model=ExtendedJob,
    openapi_extra=body_schema(Extension),
    responses={409: {"description": "It has not ended, or cannot go on."}},
)
async def extend(request: Request, job: JobId, caller: Writer, backend: BackendDep) -> Response:
    """Continue an ended job, with its optimizer state, schedule position, data order, numbering and ledger."""
    wanted = await read_model(request, Extension)
    record, notes = await backend.steering.extend(job, wanted.max_updates, by=caller.id)
    return Json(ExtendedJob(**record.model_dump(), notes=notes), 202, {"ETag": f'"{record.revision}"'})


# -- operations ------------------------------------------------------------------------------------------------------


@router.post("/checkpoints", status_code=202, response_model=Operation)
async def checkpoint_now(job: JobId, caller: Writer, backend: BackendDep) -> Response:
    """Request a checkpoint of the current weights; the operation reports the checkpoint's number once it exists."""
    return await begin(backend, job, "checkpoint", caller)


@router.get("/operations/{operation}", response_model=Operation, dependencies=[require("jobs:read")])
async def get_operation(
    job: JobId,
    operation: Annotated[str, Path(max_length=64)],
    backend: BackendDep,
    wait: Annotated[float, Query(ge=0, le=60, description="Hold the reply until it is done")] = 0,
) -> Response:
    """Return an operation on the job; the job's record keeps only the newest operations."""

    def find(record: JobRecord) -> Operation | None:
        return next((one for one in record.operations if one.id == operation), None)

    def is_over(record: JobRecord) -> bool:
        return (found := find(record)) is None or found.state != "pending"

    found = find(await backend.feeds.until(await backend.jobs.get(job), is_over, wait))
    if found is None:
        raise NotFound(f"job '{job}' remembers no operation '{operation}'")
    return Json(found)
