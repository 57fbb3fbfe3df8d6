"""Server-sent events (WHATWG HTML §9.2) with resumable ids, pings during silence, and an explicit end event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson

from penstock.services.coordinator.problems import from_error
from penstock.shared.errors import PenstockError

__all__ = ["CONTENT", "END", "HEADERS", "PING", "PING_S", "RETRY", "event_stream", "failure", "frame"]

PING_S = 15.0
"""Seconds of silence before a ping, which keeps proxies from closing the connection and detects dead clients."""
RETRY = b"retry: 1000\n\n"
"""First bytes of a stream: the client's delay before it reconnects, in ms."""
PING, END = b": ping\n\n", b"event: end\ndata: {}\n\n"
EventId = int | str
"""Id of an event, which a client sends back as ``Last-Event-ID``: a stream sequence number, or a one-line cursor."""
CONTENT: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "description": "One event of the stream.",
            "required": ["data"],
            "properties": {
                "data": {"type": "string", "description": "JSON; of completions the last one is `[DONE]`"},
                "event": {"type": "string"},
                "id": {"type": "string", "description": "What `Last-Event-ID` resumes after"},
                "retry": {"type": "integer", "description": "Milliseconds"},
            },
        }
    }
}
"""Schema of event streams in the OpenAPI document. The schema describes a single event, because OpenAPI before 3.2
cannot describe a stream."""
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def event_stream(
    rows: AsyncIterator[tuple[EventId | None, dict[str, Any]]], *, stopping: asyncio.Event, ping_s: float = PING_S
) -> AsyncIterator[bytes]:
    """Yield the bytes of an event stream over ``rows``.

    Each row becomes ``id: ID / event: TYPE / data: JSON``; clients cannot resume after a row without an id. ``event:
    end`` follows the last row. When ``stopping`` is set, or the source fails, the stream breaks off and the client
    resumes with ``Last-Event-ID``.
    """
    yield RETRY
    stop = asyncio.create_task(stopping.wait())
    pending: asyncio.Task[tuple[EventId | None, dict[str, Any]]] | None = None
    try:
        while not stopping.is_set():
            pending = pending or asyncio.create_task(_next(rows))
            await asyncio.wait({pending, stop}, timeout=ping_s, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                if not stopping.is_set():
                    yield PING
                continue
            done, pending = pending, None
            try:
                seq, row = done.result()
            except StopAsyncIteration:
                yield END
                return
            except PenstockError as error:
                yield failure(error)
                return
            yield frame(seq, row)
    finally:
        for task in (stop, pending):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, PenstockError):
                    await task
        close = getattr(rows, "aclose", None)
        if close is not None:
            await close()


def frame(id: EventId | None, row: dict[str, Any]) -> bytes:
    """Encode one event."""
    place = f"id: {id}\n".encode() if id is not None else b""
    return place + _event(str(row.get("type", "message")), {"id": id, **row})


def failure(error: PenstockError) -> bytes:
    """Encode the error event that precedes the end of a broken stream."""
    problem = from_error(error)
    return _event("error", {"code": problem.code, "detail": problem.detail})


async def _next(rows: AsyncIterator[tuple[EventId | None, dict[str, Any]]]) -> tuple[EventId | None, dict[str, Any]]:
    return await anext(rows)


def _event(name: str, data: dict[str, Any]) -> bytes:
    label = name.replace("\n", " ").replace("\r", " ")
    return f"event: {label}\ndata: ".encode() + orjson.dumps(data) + b"\n\n"
