"""Trace ids, created for a request at the API and propagated with messages and logs.

A context variable holds the id, so that tasks started for a request, or for the job that it submitted, inherit it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["TRACE_HEADER", "current_trace", "new_trace", "trace_of", "tracing"]

TRACE_HEADER = "Penstock-Trace"
"""Header with the trace id, in messages without an envelope."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_trace: ContextVar[str] = ContextVar("penstock_trace", default="")


def current_trace() -> str:
    """Return the trace id of the current task, or ''."""
    return _trace.get()


def new_trace() -> str:
    """Return a new unique id: 32 hex digits, as in the W3C's Trace Context."""
    return secrets.token_hex(16)


def trace_of(traceparent: str) -> str:
    """Return the trace id in a header ``traceparent`` (W3C Trace Context), or '' if it has no valid one."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    return found[1] if found is not None else ""


@contextmanager
def tracing(trace: str) -> Iterator[None]:
    """Set the trace id of all messages and log lines inside the block, also in tasks that the block starts."""
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)
