"""Keeps the ids of feedback whose messages were purged from FEEDBACK, so that a rebuilt index still knows these ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from penstock.services.coordinator.payload import whole_of
from penstock.shared.errors import NotFound, ProtocolError, StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, FeedbackIds
from penstock.shared.transport.bus import Bus

__all__ = ["keep_ids", "purge_feedback"]

AT_ONCE = 4_096
"""Maximum number of ids in one message; each takes about 65 bytes."""


async def keep_ids(bus: Bus, job: str, items: Sequence[tuple[int, Feedback]]) -> None:
    """Store the ids of items, each with the stream sequence number of its message. Raises Unavailable."""
    for start in range(0, len(items), AT_ONCE):
        ids = FeedbackIds.of(items[start : start + AT_ONCE])
        if ids.rows:
            await bus.publish(subjects.feedback_ids(job), pack(ids, job=job))


async def purge_feedback(bus: Bus, job: str, *, below_seq: int) -> None:
    """Purge a job's messages below the stream sequence number ``below_seq`` from FEEDBACK, but keep the ids of the
    feedback items in them. The caller makes sure that the job has decided on all these items.

    Works in chunks. The ids of a chunk are stored before its feedback is removed, or afterwards if the stream has no
    room for them.

    Raises:
        Unavailable: the bus went away; safe to repeat.
    """
    some: list[tuple[int, Feedback]] = []

    async def remove(below: int) -> None:
        items = some.copy()
        some.clear()
        try:
            await keep_ids(bus, job, items)
        except StreamFull:
            await bus.purge(subjects.FEEDBACK, subjects.feedback(job), below_seq=below)
            await keep_ids(bus, job, items)
        else:
            await bus.purge(subjects.FEEDBACK, subjects.feedback(job), below_seq=below)

    async with contextlib.aclosing(bus.scan(subjects.FEEDBACK, subjects.feedback(job))) as messages:
        async for message in messages:
            if message.seq >= below_seq:
                break
            if len(some) >= AT_ONCE:
                await remove(message.seq)
            with contextlib.suppress(ProtocolError, NotFound):  # logged at the first reading
                batch = await whole_of(bus, subjects.FEEDBACK, message, FeedbackBatch)
                some += [(message.seq, item) for item in batch.items]
            await asyncio.sleep(0)  # let decisions of other jobs run
    await remove(below_seq)
