"""What DECISIONS tells a new leader that neither the ledger nor the streams say."""

from __future__ import annotations

import asyncio
import contextlib

from penstock.services.coordinator.feedback.pieces import data_of
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.interaction import FateBatch
from penstock.shared.transport.bus import Bus

__all__ = ["posted_episodes_over"]

NEWEST = 5_000
"""So many of the newest messages are read."""


async def posted_episodes_over(bus: Bus, job: str) -> list[tuple[str, str]]:
    """What was told of a job's posted episodes, see ``FateBatch.over``. Raises Unavailable."""
    subject, found = subjects.decisions(job), list[tuple[str, str]]()
    newest = await bus.last(subjects.DECISIONS, subject)
    first = 1 if newest is None else max(1, newest.seq - NEWEST)
    for message in await bus.read(subjects.DECISIONS, subject, start_seq=first):
        await asyncio.sleep(0)  # the lease is renewed meanwhile
        with contextlib.suppress(ProtocolError):  # of another version: late turns are new episodes, as they were before
            found += unpack(await data_of(bus, subjects.DECISIONS, message), FateBatch)[0].over
    return found
