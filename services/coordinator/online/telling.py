"""What was decided is told in DECISIONS, and counted: the bus side of fates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import xxhash

from penstock.services.coordinator.online.funnel import Funnel
from penstock.services.coordinator.retry import Retry
from penstock.shared.errors import StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.interaction import Fate, FateBatch, InteractionFate
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["Telling"]

logger = logging.getLogger(__name__)

MAX_FATES = 1000
"""Fates of one message."""


class Telling:
    """Of one job, by its leader.

    Args:
        retry: what says that the bus is waited for.
    """

    def __init__(self, bus: Bus, job: str, *, epoch: int, funnel: Funnel, retry: Callable[[], Retry]) -> None:
        self._bus, self._job, self._epoch, self._funnel, self._retry = bus, job, epoch, funnel, retry

    async def tell(
        self, fates: Sequence[Fate], interactions: Sequence[InteractionFate], over: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Append fates, and posted episodes that are over, to DECISIONS before anything else is decided."""
        self._funnel.on_fates(fates)
        self._funnel.on_interactions(interactions)
        for start in range(0, max(len(fates), len(interactions), len(over)), MAX_FATES):
            some = slice(start, start + MAX_FATES)
            batch = FateBatch(items=list(fates[some]), interactions=list(interactions[some]), over=list(over[some]))
            data = pack(batch, job=self._job, epoch=self._epoch)
            msg_id = f"fates:{self._job}:{xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(batch))}"
            count = len(batch.items) + len(batch.interactions)
            send = partial(self._send, Outgoing(subjects.decisions(self._job), data, {}, msg_id), count)
            what = f"{count} fates of live answers"
            await self._retry().until_taken(what, subjects.decisions(self._job), send)

    async def _send(self, message: Outgoing, count: int) -> None:
        try:
            await self._bus.publish_whole([message], deadline_s=5)
        except StreamFull as error:  # what people are told; of what is trained only late turns depend on it
            logger.error("%s: %d fates are lost: %s", self._job, count, error)
