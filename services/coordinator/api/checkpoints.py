"""Routes that list and download checkpoints."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from fastapi import APIRouter, Header, Path
from starlette.responses import FileResponse, Response

from penstock.services.coordinator.api.access import BackendDep, JobId
from penstock.services.coordinator.api.replies import HttpProblem, Json
from penstock.services.coordinator.api.schemas import CheckpointList, CheckpointRow
from penstock.shared.errors import Conflict

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])

Number = Annotated[int, Path(ge=0, lt=1 << 53, description="Batches trained before the checkpoint")]
FileName = Annotated[str, Path(description="As the checkpoint's `files` name it", max_length=500)]
_START = re.compile(r"bytes=(\d{1,18})-", re.ASCII)


@router.get("", response_model=CheckpointList)
async def list_checkpoints(job: JobId, backend: BackendDep) -> Response:
    """The checkpoints that the ledger records, oldest first, with the sha256 of every file."""
    return Json({"object": "list", "data": await backend.control.checkpoints(job), "has_more": False})


@router.get("/{number}", response_model=CheckpointRow)
async def get_checkpoint(job: JobId, number: Number, backend: BackendDep) -> Response:
    """One checkpoint and its files."""
    return Json(await backend.control.checkpoint(job, number))


@router.get(
    "/{number}/files/{name:path}",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The part that Range asks for."},
        409: {"description": "The files are not on the coordinator's host."},
        416: {"description": "The range starts past the end of the file."},
    },
)
async def download(
    *,
    job: JobId,
    number: Number,
    name: FileName,
    backend: BackendDep,
    wanted: Annotated[str, Header(alias="range")] = "",
    if_range: Annotated[str, Header()] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """Download a file. ``ETag`` is its sha256; ``Range`` with ``If-Range`` goes on where a download broke off."""
    path, sha256 = await backend.control.checkpoint_file(job, number, name)
    etag = f'"{sha256}"'
    if etag in (tag.strip() for tag in if_none_match.split(",")):
        return Response(status_code=304, headers={"ETag": etag})
    try:
        found = await asyncio.to_thread(path.stat)
    except FileNotFoundError:
        raise Conflict(f"file '{name}' of checkpoint {number} is gone") from None
    size = found.st_size
    start = _START.match(wanted) if if_range in ("", etag) else None
    if start is not None and int(start[1]) >= size:
        detail = f"the range starts at {start[1]}, '{name}' has {size} bytes"
        raise HttpProblem(416, "range_not_satisfiable", detail, headers={"Content-Range": f"bytes */{size}"})
    return FileResponse(path, media_type="application/octet-stream", headers={"ETag": etag}, stat_result=found)
