"""Routes that submit, show and control jobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from penstock.services.coordinator.api.access import Backend, BackendDep, JobId
from penstock.services.coordinator.api.http.bodies import read_job
from penstock.services.coordinator.api.http.idempotency import token_of
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.own_models import check_name
from penstock.services.coordinator.api.schemas import DryRun, JobList
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.jobs.job_index import Order
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.config.base import named
from penstock.shared.config.embodied import SimulatorBase
from penstock.shared.config.environment import VerifiersConfig
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import AnyJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.model import REFERENCE, parse_reference
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.files import is_uploaded
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord, Phase

__all__ = ["MAX_PAGE", "MAX_WAIT_S", "check_code", "check_files", "router"]

MAX_PAGE = 100
MAX_WAIT_S = 300.0
CHARACTERS = "char"
"""Name of the character tokenizer, which has no file."""
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""Name of a model on a hub, such as `ORG/NAME`. A path on disk can have the same form."""
_LABEL = re.compile(r"metadata\[(.{1,64})\]")

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
READ = [require("jobs:read")]
Writer = Annotated[Caller, require("jobs:write")]

Goal = Literal["terminal", "change"] | Phase


@router.post(
    "", status_code=202, response_model=JobRecord,
    responses={200: {"model": DryRun}, 507: {"description": "The ledger has no room for another job."}},
)  # fmt: skip
async def submit(
    request: Request,
    caller: Annotated[Caller, require("jobs:write", reach="checked")],
    backend: BackendDep,
    dry_run: bool = False,
) -> Response:
    """Submit a job file, as JSON or YAML. With ``dry_run=true`` only validate the job file, and show which effects its
    submission would have."""
    spec, raw = await read_job(request)
    await _check_models(backend, caller, spec)
    check_code(caller, spec, backend.settings)
    await asyncio.to_thread(check_files, caller, spec, backend.settings)
    if dry_run:
        return Json({"valid": True, "plan": await backend.submissions.dry_run(spec)})
    header = request.headers.get("idempotency-key")
    key = f"{caller.id}\n{token_of(header)}" if header is not None else ""
    record = await backend.submissions.submit(spec, raw, key=key)
    return _record(record, 202, {"Location": f"/v1/jobs/{record.id}"})


@router.get("", response_model=JobList)
async def list_jobs(
    *,
    request: Request,
    caller: Annotated[Caller, require("jobs:read", reach="checked")],
    backend: BackendDep,
    after: Annotated[str | None, Query(max_length=64, description="last_id of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Order = "desc",
    phase: Phase | None = None,
    name: Annotated[str | None, Query(max_length=63)] = None,
    kind: Annotated[
        str | None, Query(max_length=32, description="rl, online_rl, embodied, evaluation or serving")
    ] = None,
) -> Response:
    """List jobs by time of submission, newest first unless ``order=asc``. A key that is restricted to some models sees
    only the jobs of these models.

    ``metadata[KEY]=VALUE`` in the query, which may be repeated, selects jobs with these labels.
    """
    labels = {m[1]: value for key, value in request.query_params.multi_items() if (m := _LABEL.fullmatch(key))}
    index = await backend.jobs.index()
    found = index.page(
        after=after, limit=limit + 1, order=order, phase=phase, name=name, kind=kind, labels=labels,
        models=caller.models,
    )  # fmt: skip
    page = [entry.record() for entry in found[:limit]]
    return Json(
        JobList(
            data=page,
            has_more=len(found) > limit,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
        )
    )


@router.get("/{job_id}", response_model=JobRecord, responses={304: {"description": "Not changed."}}, dependencies=READ)
async def get_job(
    job: JobId,
    backend: BackendDep,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to hold the reply")] = 0,
    goal: Annotated[Goal, Query(alias="for", description="terminal, change, or a phase")] = "terminal",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """Show a job. With ``?wait=60&for=terminal`` the reply waits up to 60 s until the job has ended; ``for`` may also
    name a phase."""
    record = await backend.jobs.get(job)
    if wait and not if_none_match and goal == "change":
        if_none_match = _etag(record)
    record = await backend.feeds.until(record, lambda now: _reached(now, goal, if_none_match), wait)
    if if_none_match and _matches(if_none_match, record):
        return Response(status_code=304, headers={"ETag": _etag(record)})
    return _record(record, 200)


@router.delete(
    "/{job_id}",
    status_code=204,
    dependencies=[require("jobs:write")],
    responses={409: {"description": "It has not ended, or a job that runs began with one of its checkpoints."}},
)
async def delete(job: JobId, backend: BackendDep, checkpoints: bool = False) -> Response:
    """Delete a job that has ended: its record, ledger, groups, metrics, events and feedback. This cannot be undone.

    Its checkpoints stay on disk, but no reply names them any more; ``checkpoints=true`` deletes them, too.
    """
    await backend.steering.delete(job, checkpoints=checkpoints)
    return Response(status_code=204)


@router.post("/{job_id}/cancel", status_code=202, response_model=JobRecord)
async def cancel(
    job: JobId, caller: Writer, backend: BackendDep, force: bool = False, checkpoint: bool = True
) -> Response:
    """Request that a job ends. It drains and writes a checkpoint first. Safe to repeat.

    With ``checkpoint=false`` it only drains; with ``force=true`` it does neither.
    """
    record = await backend.steering.set_desired(job, "cancelled", by=caller.id, force=force, checkpoint=checkpoint)
    return _record(record, 202)


@router.post("/{job_id}/pause", status_code=202, response_model=JobRecord)
async def pause(job: JobId, caller: Writer, backend: BackendDep) -> Response:
    """Request that a job stops after its current update. Safe to repeat."""
    return _record(await backend.steering.set_desired(job, "paused", by=caller.id), 202)


@router.post("/{job_id}/resume", status_code=202, response_model=JobRecord)
async def resume(job: JobId, caller: Writer, backend: BackendDep) -> Response:
    """Resume a paused job. Safe to repeat."""
    return _record(await backend.steering.set_desired(job, "running", by=caller.id), 202)


async def _check_models(backend: Backend, caller: Caller, spec: AnyJob) -> None:
    """Check that the caller's key may use the new job's name, and the job whose checkpoint the new job starts from. A
    key without a restriction to models may use every name and job. Raises HttpProblem (403)."""
    if caller.models is None:
        return
    check_name(caller, spec.name)
    if isinstance(spec, EmbodiedJob):
        return
    await check_origin(backend, caller, spec.model.path or "")


async def check_origin(backend: Backend, caller: Caller, path: str) -> None:
    """Check that the caller's key may use the job whose checkpoint ``path`` names. Accept a ``path`` that names no
    job's checkpoint.

    Raises:
        HttpProblem: 403 the key is for other models than that of the checkpoint's job.
    """
    if caller.models is None or not path.startswith(REFERENCE):
        return
    with contextlib.suppress(ConfigError):  # a later check reports a bad reference in terms of the job file
        job, _ = parse_reference(path)
        for made_by in (await backend.jobs.index()).of_models(frozenset({job})):
            if not caller.may_use(made_by.name, made_by.id):
                check_name(caller, path)


def check_code(caller: Caller, spec: AnyJob, settings: ServiceSettings) -> None:
    """Check that the caller may run the user code that a job file names. Built-in components need no permission.

    Raises:
        HttpProblem: 403 the caller's key lacks the scope jobs:code, or the key or the deployment does not allow the
            module; the text names the setting of the job file.
    """
    found = [*named(spec, "code")]
    if isinstance(spec, EmbodiedJob):  # a module that registers the task
        found += [(f"{section}.task", one.task) for section, one in _simulators(spec) if ":" in one.task]
    elif spec.model.trust_remote_code:
        found.append(("model.trust_remote_code", ""))
    if not isinstance(spec, ServingJob) and isinstance(spec.environment, VerifiersConfig) and not spec.environment.path:
        found.append(("environment.env.taskset.id", spec.environment.env["taskset"]["id"]))
    if not found:
        return
    if not caller.may("jobs:code"):
        raise HttpProblem(
            403, "missing_scope", f"{found[0][0]} names code to be run: the key needs the scope jobs:code"
        )
    deployment = frozenset(name.strip() for name in settings.code_modules.split(",") if name.strip())
    for key, name in found:
        module = name.partition(":")[0] if ":" in name else name
        for allowed, whose in ((deployment, "PENSTOCK_CODE_MODULES"), (caller.code_modules, "this key")):
            if allowed is not None and not _is_below(module, allowed):
                listed = ", ".join(sorted(allowed)) or "none"
                raise HttpProblem(403, "other_code", f"{key}: '{name}' is not among the modules of {whose}: {listed}")


def _is_below(module: str, allowed: frozenset[str]) -> bool:
    return "*" in allowed or any(module == name or module.startswith(f"{name}.") for name in allowed)


def _files_in_options(spec: AnyJob) -> Iterator[tuple[str, str]]:
    """Yield ``(setting, text)`` of each simulator option that looks like a path, since the simulator may read it."""
    if not isinstance(spec, EmbodiedJob):
        return
    for section, simulator in _simulators(spec):
        for key, text in _texts_in(simulator.options, f"{section}.options"):
            if os.sep in text or text.startswith("~") or os.path.lexists(text):
                yield key, text


def _simulators(spec: EmbodiedJob) -> Iterator[tuple[str, SimulatorBase]]:
    """Yield ``(section of the job file, simulator)`` for each simulator of a job."""
    yield "environment", spec.environment
    if spec.evaluation.environment is not None:
        yield "evaluation.environment", spec.evaluation.environment


def _texts_in(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts_in(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _texts_in(inner, f"{key}[{place}]")


def check_files(caller: Caller, spec: AnyJob, settings: ServiceSettings) -> None:
    """Check that a caller may read the files that a job file names, after following symbolic links. Reads the disk: run
    it in a thread.

    Raises:
        HttpProblem: 403 a path leads outside the deployment's directories; the text names the setting of the job file.
    """
    roots = [Path(root.strip()).expanduser().resolve() for root in settings.job_roots.split(",") if root.strip()]
    if not roots and caller.may("admin"):
        return
    for key, name in [*named(spec, "file"), *_files_in_options(spec)]:
        if name.startswith(REFERENCE) or is_uploaded(name) or (key == "model.tokenizer" and name == CHARACTERS):
            continue
        if _HUB.fullmatch(name) and not os.path.lexists(name):
            continue
        if not any(_resolved(name).is_relative_to(root) for root in roots):
            where = ", ".join(map(str, roots)) or "none; an administrator may set PENSTOCK_JOB_ROOTS"
            raise HttpProblem(403, "other_path", f"{key}: '{name}' is not below the directories for jobs: {where}")


def _resolved(name: str) -> Path:
    """Return the path ``name`` with symbolic links resolved. Raises HttpProblem: 403 they cannot be resolved."""
    try:
        return Path(name).expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # link loops, unknown users, bytes that are not valid in paths
        raise HttpProblem(403, "other_path", f"'{name}' cannot be followed: {error}") from None


def _record(record: JobRecord, status: int, headers: dict[str, str] | None = None) -> Response:
    return Json(record, status, {"ETag": _etag(record), **(headers or {})})


def _etag(record: JobRecord) -> str:
    return f'"{record.revision}"'


def _matches(if_none_match: str, record: JobRecord) -> bool:
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return "*" in tags or _etag(record) in tags


def _reached(record: JobRecord, goal: str, seen: str) -> bool:
    if record.status.phase in TERMINAL_PHASES:
        return True
    if goal == "change":
        return not _matches(seen, record)
    return record.status.phase == goal
