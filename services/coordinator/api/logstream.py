"""Following the services' logs: the lines as they come, to the end of the job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.services.coordinator.api.control import Control, Row
from penstock.shared.protocol.jobs import TERMINAL_PHASES

__all__ = ["LOOK_S", "follow_logs"]

LOOK_S = 0.5
"""Pause between two looks at the files."""


async def follow_logs(
    control: Control, job: str, *, service: str | None, tail: int, after: str | None
) -> AsyncIterator[tuple[str, Row]]:
    """``(cursor, {"type": "log", "lines": [...]})`` whenever there are new lines; first the last ``tail``.

    Ends once the job is terminal and a last look was taken.
    """
    cursor = after
    while True:
        over = (await control.get(job)).status.phase in TERMINAL_PHASES
        found = await control.logs(job, service=service, tail=tail, after=cursor)
        cursor = str(found["next"] or "")
        if found["lines"]:
            yield cursor, {"type": "log", "lines": found["lines"]}
        if over:
            return
        await asyncio.sleep(LOOK_S)
