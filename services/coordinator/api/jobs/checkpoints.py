"""Routes that list and download checkpoints."""

from __future__ import annotations

import asyncio
import pathlib
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path
from starlette.responses import Response, StreamingResponse

from penstock.services.coordinator.api.access import BackendDep, JobId
from penstock.services.coordinator.api.http.open_file import byte_range, open_file, reply_of
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.schemas import CheckpointList, CheckpointRow
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.errors import Conflict, Unavailable

__all__ = ["artifacts", "router"]

router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])
artifacts = APIRouter(tags=["checkpoints"])
READ = [require("jobs:read")]
TAR = "application/x-tar"
FILE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
    206: {"description": "The part that Range asks for."},
    304: {"description": "Not changed."},
    409: {"description": "The files are not on the coordinator's host."},
    416: {"description": "The range starts past the end of the file."},
}

Number = Annotated[int, Path(ge=0, lt=1 << 53, description="Batches trained before the checkpoint")]
FileName = Annotated[str, Path(description="As the checkpoint's `files` name it", max_length=500)]
CHUNK_BYTES = 1 << 20
BLOCK = tarfile.BLOCKSIZE


@router.get("", response_model=CheckpointList, dependencies=READ)
async def list_checkpoints(job: JobId, backend: BackendDep) -> Response:
    """List the checkpoints that the ledger records, oldest first, with the sha256 of every file."""
    return Json({"object": "list", "data": await backend.checkpoints.rows(job), "has_more": False})


@router.get("/{number}", response_model=CheckpointRow, dependencies=READ)
async def get_checkpoint(job: JobId, number: Number, backend: BackendDep) -> Response:
    """Show one checkpoint and its files."""
    return Json(await backend.checkpoints.row(job, number))


@router.delete(
    "/{number}",
    status_code=204,
    dependencies=[require("jobs:write")],
    responses={409: {"description": "The run needs it, or its files are not here."}},
)
async def delete(job: JobId, number: Number, backend: BackendDep) -> Response:
    """Delete the files of a checkpoint. 409 for the initial, best and newest checkpoints while the job runs."""
    await backend.checkpoints.delete(job, number)
    return Response(status_code=204)


@router.get(
    "/{number}/archive",
    response_class=StreamingResponse,
    dependencies=[require("artifacts:read")],
    responses={
        200: {"content": {TAR: {"schema": {"type": "string", "format": "binary"}}}},
        409: {"description": "The files are not on the coordinator's host."},
    },
)
async def archive(job: JobId, number: Number, backend: BackendDep) -> Response:
    """Download all files of a checkpoint as one tar, in the directory `checkpoint-NUMBER`. Each download has the same
    bytes."""
    row = await backend.checkpoints.row(job, number)
    if not row["available"]:
        raise Conflict(f"the files of checkpoint {number} are not on the coordinator's host")
    members = []
    for file in row["files"]:
        path, _ = await backend.checkpoints.file(job, number, file["name"])
        members.append(_Member(f"checkpoint-{number}/{file['name']}", path, file["nbytes"]))
    name = f"{job}-{number}.tar"
    headers = {"Content-Length": str(_tar_bytes(members)), "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(_tar_stream(members, mtime=int(row["time"])), media_type=TAR, headers=headers)


@router.get(
    "/{number}/files/{name:path}",
    response_class=StreamingResponse,
    dependencies=[require("artifacts:read")],
    responses=FILE_RESPONSES,
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
    """Download a file of a checkpoint. The ``ETag`` is its sha256; ``Range`` with ``If-Range`` resumes a download."""
    path, sha256 = await backend.checkpoints.file(job, number, name)
    what = f"file '{name}' of checkpoint {number}"
    return await send_file(path, sha256, what, wanted=wanted, if_range=if_range, if_none_match=if_none_match)


@artifacts.get(
    "/v1/artifacts/{sha256}",
    response_class=StreamingResponse,
    dependencies=[require("artifacts:read")],
    responses=FILE_RESPONSES,
)
async def artifact(
    *,
    sha256: Annotated[str, Path(max_length=64, description="SHA-256 of the content, in hex")],
    backend: BackendDep,
    wanted: Annotated[str, Header(alias="range")] = "",
    if_range: Annotated[str, Header()] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """Download a file of any committed checkpoint by its sha256, which is also its ``ETag``; supports ``Range``."""
    path = await asyncio.to_thread(backend.artifacts.find, sha256)
    return await send_file(path, sha256, "this file", wanted=wanted, if_range=if_range, if_none_match=if_none_match)


async def send_file(
    path: pathlib.Path, sha256: str, what: str, *, wanted: str, if_range: str, if_none_match: str
) -> Response:
    """Return a response with the file, or with the part that the ``Range`` header requests, or 304 if the client
    already has the file.

    Args:
        what: name of the file in the error message.
        wanted: the header ``Range``.

    Raises:
        Conflict: retention deleted the file meanwhile.
        HttpProblem: 416 the range starts past the end of the file.
    """
    etag = f'"{sha256}"'
    if etag in (tag.strip() for tag in if_none_match.split(",")):
        return Response(status_code=304, headers={"ETag": etag})
    try:
        file, size = await open_file(path)
    except FileNotFoundError:
        raise Conflict(f"{what} is gone") from None
    try:
        part = byte_range(wanted, size) if if_range in ("", etag) else None
    except HttpProblem:
        file.close()
        raise
    return reply_of(file, size, part, etag=etag)


@dataclass(frozen=True)
class _Member:
    """A file to archive: ``path`` on disk, and ``name``, its path inside the archive."""

    name: str
    path: pathlib.Path
    nbytes: int


def _tar_bytes(members: Sequence[_Member]) -> int:
    """Return the length of the archive in bytes."""
    return sum(len(_header(one, 0)) + _padded(one.nbytes) for one in members) + 2 * BLOCK


async def _tar_stream(members: Sequence[_Member], *, mtime: int) -> AsyncIterator[bytes]:
    """Yield the bytes of the archive; ``mtime`` (Unix seconds) applies to every file in it.

    Raises:
        Unavailable: a file is gone or has another size; the archive is truncated there.
    """
    for one in members:
        yield _header(one, mtime)
        sent = 0
        try:
            file = await asyncio.to_thread(one.path.open, "rb")
            with file:
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    sent += len(chunk)
                    yield chunk
        except OSError as error:
            raise Unavailable(f"'{one.name}' cannot be read any more: {error}") from None
        if sent != one.nbytes:
            raise Unavailable(f"'{one.name}' has {sent} bytes, not {one.nbytes}")
        yield bytes(_padded(sent) - sent)
    yield bytes(2 * BLOCK)


def _header(one: _Member, mtime: int) -> bytes:
    info = tarfile.TarInfo(one.name)
    info.size, info.mtime, info.mode = one.nbytes, mtime, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _padded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
