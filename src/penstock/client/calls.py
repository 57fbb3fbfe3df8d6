"""Requests of the API as values: what to send, and how to read the reply. Both clients share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import orjson
from pydantic import BaseModel, ValidationError

from penstock.client.beside import JobText, read_job
from penstock.client.results import Funnel, Interaction, MetricName, Sample, StageSpan, TokenSample
from penstock.client.results.reading import many, one
from penstock.shared.config.jobs.kinds import AnyJob
from penstock.shared.errors import ConfigError, Conflict, ProtocolError
from penstock.shared.protocol.ids import new_attempt
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord

__all__ = ["Call", "Goal", "JobFile", "Order", "Records", "Row", "Rows"]

T = TypeVar("T")

Row = dict[str, Any]
"""A JSON object."""
Rows = list[Row]
Records = list[JobRecord]
JobFile = AnyJob | Mapping[str, Any] | JobText | Path | str
"""A job: a validated model, a mapping, a job file with its uploads, or the path of a YAML file."""
Order = Literal["asc", "desc"]
DRY_RUN_S = 90.0
"""Timeout of a dry run (seconds), longer than the server's own deadline for user code that hangs."""
Goal = str
"""State of a job to wait for: a phase, or ``terminal`` for any end."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP request and the function that reads its reply. ``key`` is the idempotency key; None: each POST gets a
    new one."""

    method: str
    path: str
    read: Callable[[Any], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    timeout_s: float | None = None
    key: str | None = None
    extra_headers: Mapping[str, str] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        """Return the headers. A POST carries an idempotency key, so that a retry after a lost reply has no second
        effect."""
        found = {"Idempotency-Key": self.key or new_attempt()} if self.method == "POST" else {}
        if self.body is not None:
            found["Content-Type"] = "application/json"
        return {**found, **self.extra_headers}

    def query(self) -> dict[str, str]:
        """Return the query parameters that are not None."""
        return {name: _text(value) for name, value in self.params.items() if value is not None}


def show(path: str, read: Callable[[Any], T], **params: Any) -> Call[T]:
    """Return a GET request with query parameters."""
    return Call("GET", path, read, params)


def post(path: str, body: Any = None, *, timeout_s: float | None = None) -> Call[Row]:
    """Return a POST request whose reply is an object."""
    return Call("POST", path, dict, body=None if body is None else orjson.dumps(body), timeout_s=timeout_s)


def make(path: str, read: Callable[[Any], T], **body: Any) -> Call[T]:
    """Return a POST request that creates something; the server chooses defaults for fields that are None."""
    said = {name: value for name, value in body.items() if value is not None}
    return Call("POST", path, read, body=orjson.dumps(said))


def nothing(_: Any) -> None:
    """Read an empty reply."""


def text_of(job: JobFile) -> JobText:
    """Return the job file to send for a job, with the uploads that it needs. Raises ConfigError."""
    if isinstance(job, Path | str):
        return read_job(Path(job))
    if isinstance(job, JobText):
        return job
    return JobText(job.model_dump(mode="json", exclude_unset=True) if isinstance(job, BaseModel) else dict(job))


def submit(job: JobText, key: str | None) -> Call[JobRecord]:
    """Return the request that submits a job; repeated requests with the same ``key`` submit it once."""
    return Call("POST", "/v1/jobs", read_record, body=_job_bytes(job), key=key)


def dry_run(job: JobText) -> Call[Row]:
    """Return the request that validates a job and shows its plan."""
    read = lambda data: dict(data["plan"])  # noqa: E731
    return Call("POST", "/v1/jobs", read, {"dry_run": True}, _job_bytes(job), timeout_s=DRY_RUN_S)


def get(job: str) -> Call[JobRecord]:
    """Return the request that shows a job."""
    return Call("GET", f"/v1/jobs/{job}", read_record)


def hold(job: str, goal: Goal, wait_s: float) -> Call[JobRecord]:
    """Return the request that shows a job once it has ended or reached ``goal``, or after ``wait_s`` seconds."""
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
    """Return the request for one page of jobs."""
    params = {"after": after, "limit": limit, "order": order, "phase": phase, "name": name, "kind": kind}
    params |= {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
    return Call("GET", "/v1/jobs", lambda data: [read_record(row) for row in data["data"]], params)


def steer(
    job: str, verb: Literal["cancel", "pause", "resume"], *, force: bool = False, checkpoint: bool = True
) -> Call[JobRecord]:
    """Return the request to cancel, pause or resume a job."""
    params = {"force": True if force else None, "checkpoint": None if checkpoint else False}
    return Call("POST", f"/v1/jobs/{job}/{verb}", read_record, params)


def amend(job: str, patch: Mapping[str, Any], revision: int | None, wait_s: float) -> Call[Row]:
    """Return the request to change a job file while the job runs."""
    etag = {} if revision is None else {"If-Match": f'"{revision}"'}
    body = orjson.dumps(dict(patch))
    return Call("PATCH", f"/v1/jobs/{job}", dict, {"wait": wait_s}, body, wait_s + 10, extra_headers=etag)


def extend(job: str, max_updates: int) -> Call[Row]:
    """Return the request to continue a job that has ended."""
    return post(f"/v1/jobs/{job}/extend", {"max_updates": max_updates})


def checkpoint_now(job: str) -> Call[Row]:
    """Return the request for a checkpoint of the current weights."""
    return post(f"/v1/jobs/{job}/checkpoints")


def operation(job: str, id: str, wait_s: float) -> Call[Row]:
    """Return the request that shows an operation once it is complete, or after ``wait_s`` seconds."""
    path = f"/v1/jobs/{job}/operations/{id}"
    return Call("GET", path, dict, {"wait": wait_s}, timeout_s=wait_s + 10)


def result_of(operation: Row) -> Row:
    """Return the result of a completed operation. Raises Conflict if it failed."""
    if operation["state"] == "failed":
        raise Conflict(str(operation["message"]))
    return dict(operation["result"])


def replay_of(from_batch: int | None, to_batch: int | None, *, feedback: bool) -> Row:
    """Return the body of a replay request."""
    body = {"from_batch": from_batch, "to_batch": to_batch}
    return {**body, "feedback": True} if feedback else body


def events_page(job: str, after: int, limit: int) -> Call[tuple[Rows, bool]]:
    """Return the request for one page of events. Its result is ``(events, has_more)``."""
    params = {"after": after, "limit": limit}
    return Call("GET", f"/v1/jobs/{job}/events", lambda data: (data["data"], data["has_more"]), params)


def view(job: str, name: str, **params: Any) -> Call[Row]:
    """Return the GET request for ``name`` of a job (`metrics`, `audit`, `logs`, ...), whose reply is one object."""
    return Call("GET", f"/v1/jobs/{job}/{name}", dict, params, timeout_s=120 if name == "audit" else None)


def rows(job: str, name: str, **params: Any) -> Call[Rows]:
    """Return the GET request for ``name`` of a job (`workers`, `checkpoints`, `why`, ...), whose reply is a list."""
    return Call("GET", f"/v1/jobs/{job}/{name}", lambda data: list(data["data"]), params)


def samples(
    job: str, *, step: int | None = None, limit: int = 20, sort: str | None = None, after: str | None = None,
    env: str | None = None, min_reward: float | None = None,
) -> Call[list[Sample]]:  # fmt: skip
    """List up to ``limit`` (at most 100) completions with rewards, newest update first.

    ``env``: only completions of prompts from the source with this name; ``sort``: `reward`, `-reward`, `length` or
    `-length`; ``after``: id of the last completion of the previous page.
    """
    params = {"step": step, "limit": limit, "sort": sort, "after": after, "env": env, "min_reward": min_reward}
    return Call("GET", f"/v1/jobs/{job}/samples", many(Sample), params)


def sample(job: str, id: str) -> Call[TokenSample]:
    """Show a completion token by token; ``id`` is its id in ``samples``. Raises NotFound if it is no longer stored."""
    full = id if id.startswith(f"{job}-") else f"{job}-{id}"
    return Call("GET", f"/v1/samples/{quote(full, safe='')}", one(TokenSample))


def timeline(job: str, *, step: int | None = None, limit: int = 20) -> Call[list[StageSpan]]:
    """List start and end of the stages of one update, or of the newest ``limit`` updates."""
    return Call("GET", f"/v1/jobs/{job}/timeline", many(StageSpan), {"step": step, "limit": limit})


def metric_names(job: str) -> Call[list[MetricName]]:
    """List the metrics of a job."""
    return Call("GET", f"/v1/jobs/{job}/metrics/names", many(MetricName))


def funnel(job: str) -> Call[Funnel]:
    """Count the feedback of a job by metric, source and status, and the decisions on its interactions."""
    return Call("GET", f"/v1/jobs/{job}/feedback", one(Funnel))


def interaction(id: str) -> Call[Interaction]:
    """Show the record of an interaction and the decision on it. Raises NotFound."""
    return Call("GET", f"/v1/interactions/{quote(id, safe='')}", one(Interaction))


def about(name: Literal["limits", "version"]) -> Call[Row]:
    """Return the request for the limits or the version of the deployment."""
    return Call("GET", f"/v1/{name}", dict)


def read_record(data: Any) -> JobRecord:
    """Read a job from its JSON. Raises ProtocolError if this client is too old or too new for it."""
    try:
        return JobRecord.model_validate(data)
    except ValidationError as error:
        raise ProtocolError(f"the server's job record does not fit this client: {error}") from None


def reached(record: JobRecord, goal: Goal) -> bool:
    """Return True if the job is terminal or has reached ``goal``."""
    phase = record.status.phase
    return phase in TERMINAL_PHASES or phase == goal


def _job_bytes(job: JobText) -> bytes:
    try:
        return orjson.dumps(job.data)
    except TypeError as error:
        raise ConfigError(f"the job has no JSON form: {error}") from None


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
