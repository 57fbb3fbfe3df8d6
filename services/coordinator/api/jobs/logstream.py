"""Live log lines of the services, until the end of the job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from penstock.services.coordinator.api.access import Backend
from penstock.shared.protocol.jobs import TERMINAL_PHASES

__all__ = ["POLL_S", "follow_logs"]

Row = dict[str, Any]

POLL_S = 0.5
"""Poll interval of the log files, in seconds."""


async def follow_logs(
    backend: Backend, job: str, *, service: str | None, tail: int, after: str | None, unnamed: bool
) -> AsyncIterator[tuple[str, Row]]:
    """Yield ``(cursor, {"type": "log", "lines": [...]})``: the last ``tail`` lines, then new ones as they come.

    Once the job is terminal, the stream ends after one more read. Clients at the same cursor share a read. ``after``:
    cursor of an earlier reply, to continue there; ``unnamed``: include lines without a job id.
    """
    cursor = after
    while True:
        record = await backend.feeds.once(("job", job), POLL_S, partial(backend.jobs.get, job))
        over = record.status.phase in TERMINAL_PHASES
        read = partial(backend.diagnosis.logs, job, service=service, tail=tail, after=cursor, unnamed=unnamed)
        found = await backend.feeds.once(("logs", job, service, tail, cursor, unnamed, over), POLL_S, read)
        cursor = str(found["next"] or "")
        if found["lines"]:
            yield cursor, {"type": "log", "lines": found["lines"]}
        if over:
            return
        await asyncio.sleep(POLL_S)
