"""Routes that store data sets and models (uploads in the format of OpenAI's files API), and Python files."""

from __future__ import annotations

import asyncio
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.responses import Response

from penstock.services.coordinator.api.access import BackendDep
from penstock.services.coordinator.api.http.bodies import body_schema, read_model
from penstock.services.coordinator.api.http.idempotency import token_of
from penstock.services.coordinator.api.http.open_file import open_file, reply_of
from penstock.services.coordinator.api.http.replies import Json
from penstock.services.coordinator.api.scopes import require
from penstock.services.coordinator.auth import Caller
from penstock.services.coordinator.files import CodeRecord, FileRecord, Purpose
from penstock.services.coordinator.jobs.job_index import Order
from penstock.services.coordinator.problems import Flaw, HttpProblem
from penstock.shared.errors import Conflict, NotFound

__all__ = ["router"]

router = APIRouter(prefix="/v1/files", tags=["files"])
READ, WRITE = [require("jobs:read")], [require("jobs:write")]
MULTIPART = "multipart/form-data"
MAX_CODE = 256 << 10
"""Longest file of code, in characters."""

FileId = Annotated[str, Path(max_length=64, description="file- and 32 hex digits")]
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            MULTIPART: {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "JSON lines: one row per line; of a model a ZIP archive, not compressed",
                        },
                        "purpose": {"type": "string", "enum": ["fine-tune", "model"]},
                    },
                }
            }
        },
    }
}


class FileList(BaseModel):
    """One page of files; ``after=last_id`` gets the next page."""

    object: Literal["list"] = "list"
    data: list[FileRecord]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class CodeToKeep(BaseModel):
    """A Python file to store."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(min_length=1, max_length=MAX_CODE)


class FileDeleted(BaseModel):
    """Confirmation that the file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@router.post(
    "", response_model=FileRecord, openapi_extra=_FORM, responses={507: {"description": "No room for more files."}}
)
async def upload(request: Request, caller: Annotated[Caller, require("jobs:write")], backend: BackendDep) -> Response:
    """Store a data set: JSON lines, one object per line. The server checks every line, and replies once the file is on
    disk.

    With the purpose `model` store a model: a ZIP archive of `config.json`, weights in safetensors and the tokenizer,
    without folders and not compressed. Job files name the id of the file as `model.path`.

    `/v1/limits` states the largest size.
    """
    header = request.headers.get("idempotency-key")
    key = f"{caller.id}\n{token_of(header)}" if header is not None else ""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MULTIPART:
        raise HttpProblem(415, "unsupported_media_type", f"Content-Type '{kind}' is not known here; send {MULTIPART}")
    async with request.form(max_files=1, max_fields=8) as form:
        source, others = form.get("file"), form.keys() - {"file", "purpose"}
        if others:
            raise _flawed(f"/{min(others)[:64]}", "unknown field; there are: file, purpose")
        if not isinstance(source, UploadFile):
            raise _flawed("/file", "is needed: the file to keep, with a name")
        purpose: Purpose = "model" if form.get("purpose") == "model" else "fine-tune"
        if form.get("purpose") != purpose:
            raise _flawed("/purpose", "must be 'fine-tune' or 'model'")
        name = (source.filename or "rows.jsonl")[:255]
        record = await asyncio.to_thread(backend.files.add, source.file, name, purpose, key=key)
    return Json(record, 200, {"Location": f"/v1/files/{record.id}"})


@router.post(
    "/code", response_model=CodeRecord, dependencies=[require("jobs:code")], openapi_extra=body_schema(CodeToKeep),
    responses={507: {"description": "No room for more files."}},
)  # fmt: skip
async def upload_code(request: Request, backend: BackendDep) -> Response:
    """Store a Python file, which job files name by its SHA-256: `NAME@SHA256:FUNCTION`. Needs the scope `jobs:code`.

    Workers run the code where a job names it: as scorer, tool or curriculum.
    """
    wanted = await read_model(request, CodeToKeep)
    return Json(await asyncio.to_thread(backend.files.add_code, wanted.source))


@router.get("", response_model=FileList, dependencies=READ)
async def list_files(
    *,
    backend: BackendDep,
    after: Annotated[str | None, Query(max_length=64, description="last_id of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    order: Order = "desc",
    purpose: Annotated[str | None, Query(max_length=32)] = None,
) -> Response:
    """List the files, newest first unless ``order=asc``."""
    found = await asyncio.to_thread(backend.files.list_all)
    if order == "desc":
        found.reverse()
    if after is not None:
        found = [one for one in found if (one.id < after if order == "desc" else one.id > after)]
    found = [one for one in found if purpose in (None, one.purpose)]
    page = found[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return Json(FileList(data=page, has_more=len(found) > limit, first_id=first, last_id=last))


@router.get("/{file_id}", response_model=FileRecord, dependencies=READ)
async def get_file(file_id: FileId, backend: BackendDep) -> Response:
    """Show a file."""
    return Json(await asyncio.to_thread(backend.files.find, file_id))


@router.get(
    "/{file_id}/content",
    dependencies=READ,
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def get_content(file_id: FileId, backend: BackendDep) -> Response:
    """Download the content of a file."""
    record = await asyncio.to_thread(backend.files.find, file_id)
    try:
        file, size = await open_file(backend.files.content(file_id))
    except FileNotFoundError:
        raise NotFound(f"file '{file_id}' is gone") from None
    return reply_of(file, size, None, etag=f'"{record.sha256}"')


@router.delete(
    "/{file_id}", response_model=FileDeleted, dependencies=WRITE, responses={409: {"description": "In use."}}
)
async def delete_file(file_id: FileId, backend: BackendDep) -> Response:
    """Delete a file. 409 if an unfinished job names it, or a finished job's LoRA adapters need it as base model."""
    await asyncio.to_thread(backend.files.find, file_id)
    for job in (await backend.jobs.index()).all():
        spec = job.record().spec
        if not any(file_id in PurePath(path).parts for path in _paths(spec)):
            continue
        if not job.finished:
            raise Conflict(f"job '{job.id}' reads file '{file_id}'; cancel it first")
        model = spec.get("model") or {}
        if model.get("lora") is not None and file_id in PurePath(str(model.get("path"))).parts:
            raise Conflict(f"the adapters of job '{job.id}' need model '{file_id}'; delete the job first")
    await asyncio.to_thread(backend.files.delete, file_id)
    return Json(FileDeleted(id=file_id))


def _paths(spec: dict[str, Any]) -> list[str]:
    """Return the paths of the data sources, the model and the tokenizer that a job file names."""
    data, model = spec.get("data", {}), spec.get("model") or {}
    sources = [source for name in ("train", "eval") for source in _as_list(data.get(name))]
    return [*(str(source.get("path")) for source in sources), str(model.get("path")), str(model.get("tokenizer"))]


def _as_list(sources: Any) -> list[Any]:
    return [sources] if isinstance(sources, dict) else list(sources or ())


def _flawed(pointer: str, detail: str) -> HttpProblem:
    flaw = Flaw(pointer=pointer, detail=detail)
    return HttpProblem(422, "invalid_body", f"the form is not valid: {pointer}: {detail}", errors=[flaw])
