"""Which request something is done for: a trace id that begins at the API and goes with the messages and the logs.

It travels in a context variable, so tasks that are started for a request, or for the job that it submitted, have it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["TRACE_HEADER", "current_trace", "new_trace", "trace_of", "tracing"]

TRACE_HEADER = "Penstock-Trace"
"""Header of messages that have no envelope."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_trace: ContextVar[str] = ContextVar("penstock_trace", default="")


def current_trace() -> str:
    """Id of the trace that this task belongs to, or ''."""
    return _trace.get()


def new_trace() -> str:
    """An id that nobody else has: 32 hex digits, as in the W3C's Trace Context."""
    return secrets.token_hex(16)


def trace_of(traceparent: str) -> str:
    """The trace id in a header ``traceparent`` (W3C Trace Context); '' where it has none that may be used."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    return found[1] if found is not None else ""


@contextmanager
def tracing(trace: str) -> Iterator[None]:
    """Put messages and log lines inside, also those of tasks started inside, into this trace."""
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)
