"""Uploaded data sets and graders, for both clients: ``client.files``, ``client.graders``."""

from __future__ import annotations

import hashlib
import io
import secrets
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson

from penstock.client.beside import JobText, files_of_model, read_rows
from penstock.client.calls import Call, Rows, make, nothing, show
from penstock.client.results import CheckedGrader, Code, File, GraderRun
from penstock.client.results.reading import many, one
from penstock.client.sending import AsyncSend, Send, Steps, awaits, awaits_all, runs, sends
from penstock.shared.errors import ConfigError

__all__ = ["AsyncFiles", "AsyncGraders", "Files", "Graders", "upload_beside"]

T = TypeVar("T")

_PAGE = 1000
_UPLOAD_S = 600.0
_GRADE_S = 70.0
"""Timeout of a grading request (seconds): longer than the server's deadline for a grader, so that its reply arrives."""


def _upload(path: Path, *, same: bool = False) -> Call[File]:
    """Upload a file of JSON lines; jobs refer to its ``id``. Raises ConfigError that names the invalid lines.

    Args:
        same: True: return the existing file if this key uploaded the same name and content before.
    """
    try:
        return _form(path.name, path.read_bytes(), "fine-tune", same=same)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _upload_model(folder: Path) -> Call[File]:
    """Upload a small model, or reuse an equal earlier upload. Raises ConfigError: a file cannot be read."""
    packed = io.BytesIO()
    try:
        with zipfile.ZipFile(packed, "w") as archive:
            for path in files_of_model(folder):
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes())  # without its date
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror or error}") from None
    return _form(f"{folder.name}.zip", packed.getvalue(), "model", same=True)


def _form(name: str, data: bytes, purpose: str, *, same: bool) -> Call[File]:
    boundary = secrets.token_hex(16)
    name = name.replace('"', "_").replace("\\", "_")
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    body = b"".join([head.encode(), data, f"\r\n--{boundary}--\r\n".encode()])
    content = hashlib.sha256(name.encode() + bytes(1) + data).hexdigest()
    key = f"{'rows' if purpose == 'fine-tune' else purpose}-{content}" if same else None
    return Call("POST", "/v1/files", one(File), body=body, timeout_s=_UPLOAD_S, key=key, extra_headers=kind)


def upload_code(source: str) -> Call[Code]:
    """Upload a Python file; job files refer to its functions by ``NAME@SHA256:FUNCTION``.

    Raises ConfigError: it is not Python; Conflict: the key lacks the scope jobs:code.
    """
    return make("/v1/files/code", one(Code), source=source)


def upload_beside(text: JobText) -> Steps[JobText]:
    """Upload the files that a job file names by relative paths; return the job file with references to the uploads.

    A data set or model that this key uploaded before with the same name and content is reused.

    Raises ConfigError: a file is not Python, or not JSON lines; Conflict: the key lacks the scope jobs:code.
    """
    for code in text.sources.values():
        try:
            yield upload_code(code.source)
        except ConfigError as error:
            flaw = str(error).partition("\n  source: ")[2]  # the server does not know the name of the file
            raise ConfigError(f"{code.file}: {flaw or error}") from None
    ids = {}
    for path in map(Path, sorted(text.rows)):
        if (lines := read_rows(path)) is not None:
            name = path.name if path.suffix != ".parquet" else f"{path.name}.jsonl"
            kept: File = yield _form(name, lines, "fine-tune", same=True)
            ids[str(path)] = kept.id
    for path in map(Path, sorted(text.models)):
        kept = yield _upload_model(path)
        ids[str(path)] = kept.id
    return text.with_uploads(ids)


def _list() -> Steps[list[File]]:
    """List the files, newest first."""
    found: Rows = []
    while True:
        page = yield show("/v1/files", dict, limit=_PAGE, after=found[-1]["id"] if found else None)
        found += page["data"]
        if not page["has_more"]:
            return many(File)({"data": found})


def _show(id: str) -> Call[File]:
    """Show a file. Raises NotFound."""
    return show(f"/v1/files/{id}", one(File))


def _delete(id: str) -> Call[None]:
    """Delete a file. Raises NotFound, or Conflict if a job reads the file."""
    return Call("DELETE", f"/v1/files/{id}", nothing)


def _run(grader: Mapping[str, Any], sample: str, item: Mapping[str, Any] | None = None) -> Call[GraderRun]:
    """Grade ``sample``, an answer to the prompt of the data row ``item``. Return ``reward``, ``sub_rewards``, and
    errors in ``metadata``."""
    body = {"grader": dict(grader), "model_sample": sample, "item": dict(item or {})}
    return _grade("run", one(GraderRun), body)


def _validate(grader: Mapping[str, Any]) -> Call[CheckedGrader]:
    """Check that a reward worker can load a grader. Raises ConfigError if not."""
    return _grade("validate", one(CheckedGrader), {"grader": dict(grader)})


def _grade(verb: str, read: Callable[[Any], T], body: dict[str, Any]) -> Call[T]:
    return Call("POST", f"/v1/graders/{verb}", read, body=orjson.dumps(body), timeout_s=_GRADE_S)


class Files:
    """Files: ``upload``, ``list``, ``show`` and ``delete`` data sets; ``upload_code`` for Python files."""

    def __init__(self, send: Send) -> None:
        self._send = send

    upload = sends(_upload)
    upload_code = sends(upload_code)
    list = runs(_list)
    show = sends(_show)
    delete = sends(_delete)


class AsyncFiles:
    """Files: ``upload``, ``list``, ``show`` and ``delete`` data sets; ``upload_code`` for Python files."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    upload = awaits(_upload)
    upload_code = awaits(upload_code)
    list = awaits_all(_list)
    show = awaits(_show)
    delete = awaits(_delete)


class Graders:
    """Graders in OpenAI's format: ``run`` and ``validate``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    run = sends(_run)
    validate = sends(_validate)


class AsyncGraders:
    """Graders in OpenAI's format: ``run`` and ``validate``."""

    def __init__(self, send: AsyncSend) -> None:
        self._send = send

    run = awaits(_run)
    validate = awaits(_validate)
