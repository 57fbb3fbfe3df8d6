"""Logs as JSON lines on stderr, and optionally in files.

Fields of the current task (job, trace) are kept in context variables and added to every line.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

from penstock.shared.errors import ConfigError
from penstock.shared.protocol.trace import current_trace

__all__ = ["JsonFormatter", "bound", "setup_logging"]

FILE_BYTES = 16 << 20
KEEP_S = 7 * 86_400.0
"""Age since the last write after which a log file is removed when a service starts (seconds)."""

_context: ContextVar[dict[str, Any] | None] = ContextVar("penstock_log_context", default=None)
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: time (UTC), level, logger, message, bound fields, trace, ``extra`` fields,
    error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a newline."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(_context.get() or {}),
            **({"trace": trace} if (trace := current_trace()) else {}),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Add fields (``job``, ``policy_version``, ...) to every line logged inside the block, also by tasks started inside
    it."""
    token = _context.set({**(_context.get() or {}), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def setup_logging(level: str, *, service: str, worker: str, directory: Path | None = None) -> None:
    """Replace the root logger's handlers by one for JSON lines on stderr, and one for a file in ``directory``.

    Raises:
        ConfigError: the file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if directory is not None:
        handlers.append(_open_file(directory, service, worker))
    for handler in handlers:
        handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, RotatingFileHandler):
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level.upper())
    for chatty in ("asyncio", "httpx", "httpcore", "nats"):
        logging.getLogger(chatty).setLevel(max(root.level, logging.WARNING))
    _context.set({"service": service, "worker": worker})


def _open_file(directory: Path, service: str, worker: str) -> logging.Handler:
    """Open the worker's log file ``<service>-<worker>.log``. A file of ``FILE_BYTES`` bytes is replaced by a new one,
    and only the newest full file is kept. Also remove log files, of any worker, whose last write is more than
    ``KEEP_S`` seconds ago."""
    name = worker if worker.startswith(f"{service}-") else f"{service}-{worker}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.log*"):
            if time.time() - path.stat().st_mtime > KEEP_S:
                path.unlink(missing_ok=True)
        path = directory / f"{name.replace('/', '-')}.log"
        return RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"PENSTOCK_LOG_FILES: cannot write to {directory}: {error.strerror}") from None
