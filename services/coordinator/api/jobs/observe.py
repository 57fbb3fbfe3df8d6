"""Routes that show the progress of a job: events, metrics, workers, samples, logs, what the job waits for, the audit of
its ledger, and replays of its batches."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import Response, StreamingResponse

from penstock.services.coordinator.api.access import Backend, BackendDep, JobId
from penstock.services.coordinator.api.feeds import POLL_S
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.open_file import byte_range
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.http.sse import CONTENT, HEADERS, event_stream, frame
from penstock.services.coordinator.api.schemas import (
    Audit,
    Columns,
    EventList,
    LogLines,
    ReplayRequest,
    RowList,
    SampleList,
)
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.problems import Flaw, HttpProblem, from_error
from penstock.shared.errors import PenstockError
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.cloudevents import CLOUD_EVENT, cloud_event
from penstock.shared.protocol.jobs import TERMINAL_PHASES

__all__ = ["CSV", "PARQUET", "as_csv", "as_parquet", "router"]


CSV = "text/csv"
PARQUET = "application/vnd.apache.parquet"
Row = dict[str, Any]
LOG_POLL_S = 0.5
"""Poll interval of the log files, in seconds."""


def as_csv(found: dict[str, Any]) -> bytes:
    """Return CSV with a header line and one line per step; a cell is empty where a step has no value."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", "wall", *found["series"]])
    writer.writerows(zip(found["steps"], found["wall"], *found["series"].values(), strict=True))
    return text.getvalue().encode()


def as_parquet(found: dict[str, Any]) -> bytes:
    """Return Parquet with the columns ``step`` (int64), ``wall`` and each series (float64, null for missing values).

    Raises:
        HttpProblem: 406 pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        detail = "Parquet needs pyarrow beside the coordinator (pip install 'penstock[data]'); ask for CSV or JSON"
        raise HttpProblem(406, "not_acceptable", detail) from None
    series = {name: pyarrow.array(values, pyarrow.float64()) for name, values in found["series"].items()}
    table = pyarrow.table(
        {
            "step": pyarrow.array(found["steps"], pyarrow.int64()),
            "wall": pyarrow.array(found["wall"], pyarrow.float64()),
            **series,
        }
    )
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


MP4 = "video/mp4"
_SEQ_MAX = (1 << 53) - 1
_EVENT_ID = re.compile(r"[0-9]{1,16}")

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["observe"])
READ = [require("jobs:read")]

Sequence = Annotated[int | None, Query(ge=0, le=_SEQ_MAX, description="Only events past this id")]
Env = Annotated[
    str | None, Query(max_length=32, description="Name of the source of data.train (of an evaluation: of data.eval)")
]


@router.get(
    "/events",
    response_model=EventList,
    dependencies=READ,
    responses={200: {"content": CONTENT}},
)
async def events(
    *,
    job: JobId,
    backend: BackendDep,
    after: Sequence = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    form: Annotated[
        Literal["json", "cloudevents"] | None,
        Query(alias="format", description="cloudevents: in the form of webhooks; default: as the Accept header says"),
    ] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[str, Header(json_schema_extra={"pattern": "^[0-9]{1,15}$"})] = "",
) -> Response:
    """List events; with ``Accept: text/event-stream`` follow them. ``Last-Event-ID`` resumes after the event it names.

    If later events may have been deleted by then, the stream begins with an event ``reset``. With
    ``format=cloudevents``, or ``application/cloudevents+json`` in ``Accept``, each event is a CloudEvent in the form
    that webhooks send.
    """
    feeds = backend.feeds
    start = _start(after, last_event_id)
    as_cloud_events = form == "cloudevents" or (form is None and CLOUD_EVENT in accept)
    if "text/event-stream" in accept:
        await feeds.once(("job", job), POLL_S, partial(backend.jobs.get, job))
        resumes = bool(last_event_id.strip() and start)
        stream = feeds.events(job, after=start, encode=_cloud_frame if as_cloud_events else _frame)
        if resumes and not await feeds.once(("keeps", start), POLL_S, partial(backend.events.is_kept, start)):
            stream = _after_reset(start, stream)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)
    await backend.jobs.get(job)
    found = await backend.events.page(job, after=start, limit=limit + 1)
    page = found[:limit]
    return Json(
        {
            "object": "list",
            "data": [cloud_event(job, seq, row) if as_cloud_events else {"id": seq, **row} for seq, row in page],
            "has_more": len(found) > limit,
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
        }
    )


@router.get(
    "/metrics",
    response_model=Columns,
    dependencies=[require("metrics:read")],
    responses={
        200: {
            "content": {
                CSV: {"schema": {"type": "string"}},
                PARQUET: {"schema": {"type": "string", "format": "binary"}},
            }
        },
        406: {"description": "The coordinator cannot write Parquet."},
    },
)
async def metrics(
    *,
    job: JobId,
    backend: BackendDep,
    names: Annotated[str | None, Query(max_length=4096, description="Comma-separated; default: all")] = None,
    step_from: Annotated[int | None, Query(ge=0, le=_SEQ_MAX)] = None,
    step_to: Annotated[int | None, Query(ge=0, le=_SEQ_MAX)] = None,
    max_points: Annotated[int, Query(ge=2, le=10_000)] = 1000,
    form: Annotated[
        Literal["json", "csv", "parquet"] | None, Query(alias="format", description="Default: what Accept asks for")
    ] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Show metrics as columns, one list of values per metric, thinned out to ``max_points`` steps; as JSON, CSV or
    Parquet."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] if names else None
    found = await backend.charts.metrics(job, names=wanted, step_from=step_from, step_to=step_to, max_points=max_points)
    if form == "csv" or (form is None and CSV in accept):
        return Response(as_csv(found), media_type=CSV)
    if form == "parquet" or (form is None and PARQUET in accept):
        return Response(await asyncio.to_thread(as_parquet, found), media_type=PARQUET)
    return Json(found)


@router.get("/metrics/names", response_model=RowList, dependencies=[require("metrics:read")])
async def metric_names(job: JobId, backend: BackendDep) -> Response:
    """List every metric of the job: name, number of values, first and last step, newest value."""
    return _rows(await backend.charts.names(job))


@router.get("/timeline", response_model=RowList, dependencies=READ)
async def timeline(
    job: JobId,
    backend: BackendDep,
    step: Annotated[int | None, Query(ge=1, le=_SEQ_MAX, description="Only this batch")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Newest batches")] = 20,
) -> Response:
    """List the spans of each update, for a Gantt chart: `generate`, `wait`, `train`, `checkpoint`, in Unix seconds."""
    return _rows(await backend.charts.timeline(job, step=step, limit=limit))


@router.get("/workers", response_model=RowList, dependencies=READ)
async def workers(
    job: JobId,
    backend: BackendDep,
    history: Annotated[
        bool,
        Query(description="Add `spans`: states of each worker in the last five minutes, as this coordinator saw them"),
    ] = False,
) -> Response:
    """List the workers of the job, their policy versions, and what each waits for."""
    return _rows(await backend.diagnosis.workers(job, history=history))


@router.get("/samples", response_model=SampleList, dependencies=READ)
async def samples(
    *,
    job: JobId,
    backend: BackendDep,
    step: Annotated[int | None, Query(ge=0, le=_SEQ_MAX)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    sort: Literal["reward", "-reward", "length", "-length"] | None = None,
    after: Annotated[str | None, Query(max_length=128)] = None,
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    env: Env = None,
) -> Response:
    """List completions with their rewards, newest update first. `href` of a row leads to its tokens.

    `videos` contains addresses of videos of held-out episodes; `GET /v1/jobs/{job_id}/videos` describes them.
    `held_out` is the newest evaluation of an embodied job.
    """
    found = await backend.samples.page(
        job, step=step, limit=limit + 1, sort=sort, after=after, min_reward=min_reward, env=env
    )
    films = [row["href"] for row in await backend.videos.rows(job) if row["href"]]
    held_out = await backend.feeds.once(("held_out", job), POLL_S, partial(backend.charts.held_out, job))
    more = {"has_more": len(found) > limit, "videos": films, "held_out": held_out}
    return Json({"object": "list", "data": found[:limit], **more})


@router.get("/videos", response_model=RowList, dependencies=READ)
async def videos(job: JobId, backend: BackendDep) -> Response:
    """List videos of held-out episodes, sorted by policy version and then by reset id, the number that determines
    everything random in an episode.

    All jobs share the store, which deletes its oldest videos when it is full.
    """
    return _rows(await backend.videos.rows(job))


@router.get(
    "/videos/{name}",
    dependencies=READ,
    response_class=Response,
    responses={
        200: {"content": {MP4: {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The part that Range asks for."},
        304: {"description": "Not changed."},
        416: {"description": "The range starts past the end of the file."},
    },
)
async def video(
    *,
    job: JobId,
    name: Annotated[str, Path(max_length=80, description="As the list of videos has it")],
    backend: BackendDep,
    wanted: Annotated[str, Header(alias="range")] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """Download a video as an MP4 file (H.264); supports ``Range``, which players use."""
    data = await backend.videos.data(job, name)
    etag = f'"{hashlib.sha256(data).hexdigest()}"'
    if etag in (tag.strip() for tag in if_none_match.split(",")):
        return Response(status_code=304, headers={"ETag": etag})
    start, stop = part = byte_range(wanted, len(data)) or (0, len(data))
    headers = {"ETag": etag, "Accept-Ranges": "bytes"}
    if part == (0, len(data)):
        return Response(data, media_type=MP4, headers=headers)
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return Response(data[start:stop], 206, headers=headers, media_type=MP4)


@router.get("/why", response_model=RowList, dependencies=READ)
async def why(job: JobId, backend: BackendDep) -> Response:
    """List what the job waits for. Each row has a phrase, the NATS subject, the worker concerned, and the age in
    seconds."""
    return _rows(await backend.diagnosis.why(job))


@router.get("/audit", response_model=Audit, dependencies=READ)
async def audit(job: JobId, backend: BackendDep) -> Response:
    """Check the job's ledger: drawn = trained + dropped + in flight, and all other invariants of a ledger."""
    return Json(await backend.diagnosis.audit(job))


@router.get(
    "/logs",
    response_model=LogLines,
    responses={200: {"content": CONTENT}},
)
async def logs(
    *,
    job: JobId,
    caller: Annotated[Caller, require("jobs:read")],
    backend: BackendDep,
    service: Annotated[str | None, Query(max_length=64)] = None,
    tail: Annotated[int, Query(ge=1, le=10_000)] = 100,
    after: Annotated[str | None, Query(max_length=4096, description="`next` of an earlier reply")] = None,
    follow: bool = False,
    last_event_id: Annotated[str, Header(max_length=4096)] = "",
) -> Response:
    """Show the last lines of the services' logs; with `follow=true` also stream new lines until the job ends.

    Only keys with the scope `admin` see lines without a job id, because these may concern any job.
    """
    unnamed = caller.may("admin")
    if follow:
        await backend.jobs.get(job)
        rows = _follow_logs(backend, job, service=service, tail=tail, after=last_event_id or after, unnamed=unnamed)
        stream = event_stream(rows, stopping=backend.stopping)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)
    found = await backend.diagnosis.logs(job, service=service, tail=tail, after=after, unnamed=unnamed)
    return Json(found)


@router.post(
    "/replay",
    response_class=StreamingResponse,
    dependencies=[require("jobs:write")],
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
    openapi_extra=body_schema(ReplayRequest, required=False),
)
async def replay(request: Request, job: JobId, backend: BackendDep) -> Response:
    """Train again, from a checkpoint, batches that the ledger recorded, and compare the resulting weights with the
    recorded digests. Each line of the reply is a JSON row."""
    body = await read_model(request, ReplayRequest)
    await backend.jobs.get(job)
    rows = backend.diagnosis.replay(job, **body.model_dump())
    first = await anext(rows, None)  # before the response starts, so that a refusal gets its own status
    return StreamingResponse(_lines(first, rows), media_type="application/x-ndjson", headers=HEADERS)


def _frame(job: str, seq: int, row: dict[str, Any]) -> bytes:
    return frame(seq, row)


def _cloud_frame(job: str, seq: int, row: dict[str, Any]) -> bytes:
    return frame(seq, cloud_event(job, seq, row))


async def _after_reset(after: int, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    message = f"event {after} is not kept any more: some after it may be missing here"
    row = {"type": "reset", "time": bus_time(), "level": "warning", "message": message, "data": {"after": after}}
    try:
        yield await anext(stream)
        yield frame(None, row)
        async for some in stream:
            yield some
    finally:
        await _close(stream)


async def _lines(first: dict[str, Any] | None, rows: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        if first is not None:
            yield orjson.dumps(first) + b"\n"
        async for row in rows:
            yield orjson.dumps(row) + b"\n"
            await asyncio.sleep(0)  # sends to a disconnected client never block; let the server notice
    except PenstockError as error:
        yield orjson.dumps({"done": True, "ok": False, "summary": from_error(error).detail}) + b"\n"
    finally:
        await _close(rows)


async def _close(rows: AsyncIterator[Any]) -> None:
    """Close the generator ``rows``. Python does not close it when the generator that reads from it ends early."""
    close = getattr(rows, "aclose", None)
    if close is not None:
        await close()


def _rows(found: list[dict[str, Any]]) -> Response:
    return Json({"object": "list", "data": found, "has_more": False})


def _start(after: int | None, last_event_id: str) -> int:
    if not last_event_id.strip():
        return after or 0
    if not _EVENT_ID.fullmatch(last_event_id.strip()) or int(last_event_id) > _SEQ_MAX:
        detail = "Last-Event-ID must be an id that this stream sent"
        raise HttpProblem(422, "invalid_cursor", detail, errors=[Flaw(pointer="/header/Last-Event-ID", detail=detail)])
    return int(last_event_id)


async def _follow_logs(
    backend: Backend, job: str, *, service: str | None, tail: int, after: str | None, unnamed: bool
) -> AsyncIterator[tuple[str, Row]]:
    """Yield ``(cursor, {"type": "log", "lines": [...]})``: the last ``tail`` lines, then new ones as they come.

    Once the job is terminal, the stream ends after one more read. Clients at the same cursor share a read. ``after``:
    cursor of an earlier reply, to continue there; ``unnamed``: include lines without a job id.
    """
    cursor = after
    while True:
        record = await backend.feeds.once(("job", job), LOG_POLL_S, partial(backend.jobs.get, job))
        over = record.status.phase in TERMINAL_PHASES
        read = partial(backend.diagnosis.logs, job, service=service, tail=tail, after=cursor, unnamed=unnamed)
        found = await backend.feeds.once(("logs", job, service, tail, cursor, unnamed, over), LOG_POLL_S, read)
        cursor = str(found["next"] or "")
        if found["lines"]:
            yield cursor, {"type": "log", "lines": found["lines"]}
        if over:
            return
        await asyncio.sleep(LOG_POLL_S)
