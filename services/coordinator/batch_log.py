"""The manifests of a job that runs: those that its newest checkpoint covers can be given up while BATCHES is full.

A restarted trainer repeats what came after that checkpoint; a replay starts where all that follows is still there.
"""

from __future__ import annotations

import re

from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import MSG_ID, Bus

__all__ = ["batch_id", "give_up_batches"]

_ID = re.compile(r"batch:[^:]+:(\d+)\.")


def batch_id(job: str, number: int, revision: int, epoch: int) -> str:
    """Message id of a manifest."""
    return f"batch:{job}:{number}.{revision}.{epoch}"


async def give_up_batches(bus: Bus, job: str, *, up_to: int) -> int:
    """Purge the manifests of a job before the first one above batch ``up_to``; returns how many."""
    stop = 0
    for message in await bus.read(subjects.BATCHES, subjects.batches(job), headers_only=True):
        found = _ID.match(message.headers.get(MSG_ID, ""))
        if found is None or int(found[1]) > up_to:
            break
        stop = message.seq + 1
    return await bus.purge(subjects.BATCHES, subjects.batches(job), below_seq=stop)
