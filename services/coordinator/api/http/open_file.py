"""Replies that stream a file which is already open, so that they complete even if the file is deleted meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from starlette.responses import StreamingResponse

from penstock.services.coordinator.problems import HttpProblem

__all__ = ["byte_range", "open_file", "reply_of"]

CHUNK_BYTES = 256 << 10
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


async def open_file(path: Path) -> tuple[BinaryIO, int]:
    """Open a file; return it and its size in bytes. Raises FileNotFoundError."""

    def work() -> tuple[BinaryIO, int]:
        file = path.open("rb")
        return file, os.fstat(file.fileno()).st_size

    return await asyncio.to_thread(work)


def byte_range(wanted: str, size: int) -> tuple[int, int] | None:
    """Return the range [start, stop) in the ``Range`` header ``wanted``, or None (send the whole file) if the header
    does not name exactly one valid range.

    Raises:
        HttpProblem: 416 the range starts past the end.
    """
    found = _RANGE.fullmatch(wanted.replace(" ", ""))
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:  # the last bytes
        start, stop = max(0, size - int(found[2])), size
    else:
        start, stop = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
        if found[2] and int(found[2]) < start:
            return None
    if start >= size:
        detail = f"the range starts at {start}, there are {size} bytes"
        raise HttpProblem(416, "range_not_satisfiable", detail, headers={"Content-Range": f"bytes */{size}"})
    return start, stop


def reply_of(file: BinaryIO, size: int, part: tuple[int, int] | None, *, etag: str) -> StreamingResponse:
    """Return a response that streams ``file``, or its part [start, stop), and closes the file at the end."""
    start, stop = part or (0, size)
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return StreamingResponse(
        _chunks(file, start, stop),
        status_code=200 if part is None else 206,
        headers=headers,
        media_type="application/octet-stream",
    )


async def _chunks(file: BinaryIO, start: int, stop: int) -> AsyncIterator[bytes]:
    with file:
        while start < stop:
            chunk = await asyncio.to_thread(os.pread, file.fileno(), min(CHUNK_BYTES, stop - start), start)
            if not chunk:
                return  # the file was truncated: the reply is shorter than its Content-Length, which the client notices
            start += len(chunk)
            yield chunk
