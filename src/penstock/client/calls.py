"""Every request of the API as a value: what to send and how to read the answer. Shared by both clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from penstock.shared.config.base import load_yaml
from penstock.shared.config.kinds import AnyJob
from penstock.shared.errors import ConfigError, Conflict, ProtocolError
from penstock.shared.protocol.ids import new_attempt
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord

__all__ = ["Call", "Goal", "JobFile", "Order", "Records", "Row", "Rows"]

T = TypeVar("T")

Row = dict[str, Any]
"""A JSON object."""
Rows = list[Row]
Records = list[JobRecord]
JobFile = AnyJob | Mapping[str, Any] | Path
"""A job: validated, as a mapping, or a YAML file."""
Order = Literal["asc", "desc"]
Goal = str
"""``terminal`` or a phase."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and the reader of its reply."""

    method: str
    path: str
    read: Callable[[Any], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    timeout_s: float | None = None
    key: str | None = None
    extra_headers: Mapping[str, str] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        """A POST carries a key, so that a retry after a lost answer has no second effect."""
        found = {"Idempotency-Key": self.key or new_attempt()} if self.method == "POST" else {}
        if self.body is not None:
            found["Content-Type"] = "application/json"
        return {**found, **self.extra_headers}

    def query(self) -> dict[str, str]:
        """Parameters that are set."""
        return {name: _text(value) for name, value in self.params.items() if value is not None}


def show(path: str, read: Callable[[Any], T], **params: Any) -> Call[T]:
    """Read something."""
    return Call("GET", path, read, params)


def post(path: str, body: Any = None, *, timeout_s: float | None = None) -> Call[Row]:
    """Have something done that answers with an object."""
    return Call("POST", path, dict, body=None if body is None else orjson.dumps(body), timeout_s=timeout_s)


def nothing(_: Any) -> None:
    """The reader of an empty reply."""


def submit(job: JobFile, key: str | None) -> Call[JobRecord]:
    """Submit a job; the same ``key`` submits it once."""
    return Call("POST", "/v1/jobs", read_record, body=_job_bytes(job), key=key)


def dry_run(job: JobFile) -> Call[Row]:
    """Validate a job and show its plan."""
    return Call("POST", "/v1/jobs", lambda data: dict(data["plan"]), {"dry_run": True}, _job_bytes(job))


def get(job: str) -> Call[JobRecord]:
    """Show a job."""
    return Call("GET", f"/v1/jobs/{job}", read_record)


def hold(job: str, goal: Goal, wait_s: float) -> Call[JobRecord]:
    """Show a job once it reached ``goal``, or after ``wait_s``."""
    params = {"wait": wait_s, "for": goal}
    return Call("GET", f"/v1/jobs/{job}", read_record, params, timeout_s=wait_s + 10)


def page(
    *,
    after: str | None,
    limit: int,
    order: Order,
    phase: str | None,
    name: str | None,
    kind: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Call[Records]:
    """One page of jobs."""
    params = {"after": after, "limit": limit, "order": order, "phase": phase, "name": name, "kind": kind}
    params |= {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
    return Call("GET", "/v1/jobs", lambda data: [read_record(row) for row in data["data"]], params)


def steer(
    job: str, verb: Literal["cancel", "pause", "resume"], *, force: bool = False, checkpoint: bool = True
) -> Call[JobRecord]:
    """Ask a job to change its state."""
    params = {"force": True if force else None, "checkpoint": None if checkpoint else False}
    return Call("POST", f"/v1/jobs/{job}/{verb}", read_record, params)


def amend(job: str, patch: Mapping[str, Any], revision: int | None, wait_s: float) -> Call[Row]:
    """Change a job file while the job runs."""
    etag = {} if revision is None else {"If-Match": f'"{revision}"'}
    body = orjson.dumps(dict(patch))
    return Call("PATCH", f"/v1/jobs/{job}", dict, {"wait": wait_s}, body, wait_s + 10, extra_headers=etag)


def checkpoint_now(job: str) -> Call[Row]:
    """Ask for a checkpoint."""
    return post(f"/v1/jobs/{job}/checkpoints")


def operation(job: str, id: str, wait_s: float) -> Call[Row]:
    """Show an operation once it is over, or after ``wait_s``."""
    path = f"/v1/jobs/{job}/operations/{id}"
    return Call("GET", path, dict, {"wait": wait_s}, timeout_s=wait_s + 10)


def result_of(operation: Row) -> Row:
    """What an operation that is over came to. Raises Conflict where it failed."""
    if operation["state"] == "failed":
        raise Conflict(str(operation["message"]))
    return dict(operation["result"])


def events_page(job: str, after: int, limit: int) -> Call[tuple[Rows, bool]]:
    """One page of events, and whether there is another."""
    params = {"after": after, "limit": limit}
    return Call("GET", f"/v1/jobs/{job}/events", lambda data: (data["data"], data["has_more"]), params)


def view(job: str, name: str, **params: Any) -> Call[Row]:
    """A view of a job that is an object: metrics, audit, logs."""
    return Call("GET", f"/v1/jobs/{job}/{name}", dict, params, timeout_s=120 if name == "audit" else None)


def rows(job: str, name: str, **params: Any) -> Call[Rows]:
    """A view of a job that is a list: workers, samples, why."""
    return Call("GET", f"/v1/jobs/{job}/{name}", lambda data: list(data["data"]), params)


def about(name: Literal["limits", "version"]) -> Call[Row]:
    """Facts about the deployment."""
    return Call("GET", f"/v1/{name}", dict)


def read_record(data: Any) -> JobRecord:
    """A job from its JSON. Raises ProtocolError when this client is too old or too new for it."""
    try:
        return JobRecord.model_validate(data)
    except ValidationError as error:
        raise ProtocolError(f"the server's job record does not fit this client: {error}") from None


def reached(record: JobRecord, goal: Goal) -> bool:
    """The job is where the caller waits for it to be; a terminal job goes nowhere else."""
    phase = record.status.phase
    return phase in TERMINAL_PHASES or phase == goal


def _job_bytes(job: JobFile) -> bytes:
    if isinstance(job, Path):
        job = load_yaml(job)
    if isinstance(job, BaseModel):
        return job.model_dump_json(exclude_unset=True).encode()
    try:
        return orjson.dumps(dict(job))
    except TypeError as error:
        raise ConfigError(f"the job has no JSON form: {error}") from None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
