"""Logs as JSON lines on stderr. What a task works on travels in context variables and stands in every line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import orjson

__all__ = ["JsonFormatter", "bound", "setup_logging"]

_context: ContextVar[dict[str, Any] | None] = ContextVar("penstock_log_context", default=None)
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the bound fields, ``extra`` fields, the error."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a newline."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(_context.get() or {}),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Add fields (``job``, ``policy_version``, ...) to every line logged inside, also by tasks started inside."""
    token = _context.set({**(_context.get() or {}), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def setup_logging(level: str, *, service: str, worker: str) -> None:
    """Replace the root logger's handlers by one that writes JSON lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "httpx", "httpcore", "nats"):
        logging.getLogger(chatty).setLevel(max(root.level, logging.WARNING))
    _context.set({"service": service, "worker": worker})
