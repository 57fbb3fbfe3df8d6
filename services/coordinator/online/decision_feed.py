"""Publishes decisions to DECISIONS, and reads back those that a new leader cannot derive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import xxhash

from penstock.services.coordinator.feedback.leaders import Leaders
from penstock.services.coordinator.feedback.pieces import data_of
from penstock.services.coordinator.online.funnel import Funnel
from penstock.services.coordinator.online.statuses import RecoveredDecisions
from penstock.services.coordinator.retry import Retry
from penstock.shared.errors import ProtocolError, StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.interaction import FateBatch, FeedbackStatus, InteractionStatus
from penstock.shared.transport.bus import Bus, Message, Outgoing

__all__ = ["DecisionPublisher", "oldest_undecided_time", "recover_decisions"]

logger = logging.getLogger(__name__)
MAX_STATUSES = 1000
"""Statuses in one message."""
MIN_MESSAGES = 5_000
"""Number of newest messages that a new leader reads at least."""


class DecisionPublisher:
    """Publishes the decisions of one job's leader.

    Args:
        retry: returns the wait to report while the bus is away.
    """

    def __init__(self, bus: Bus, job: str, *, epoch: int, funnel: Funnel, retry: Callable[[], Retry]) -> None:
        self._bus, self._job, self._epoch, self._funnel, self._retry = bus, job, epoch, funnel, retry

    async def publish(
        self,
        statuses: Sequence[FeedbackStatus],
        interactions: Sequence[InteractionStatus],
        closed: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Append statuses and closed posted episodes to DECISIONS before the leader decides anything else."""
        self._funnel.on_feedback_statuses(statuses)
        self._funnel.on_interaction_statuses(interactions)
        for start in range(0, max(len(statuses), len(interactions), len(closed)), MAX_STATUSES):
            window = slice(start, start + MAX_STATUSES)
            batch = FateBatch(
                items=list(statuses[window]), interactions=list(interactions[window]), over=list(closed[window])
            )
            data = pack(batch, job=self._job, epoch=self._epoch)
            msg_id = f"fates:{self._job}:{xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(batch))}"
            count = len(batch.items) + len(batch.interactions)
            send = partial(self._send, Outgoing(subjects.decisions(self._job), data, {}, msg_id), count)
            what = f"{count} statuses of live answers"
            await self._retry().until_taken(what, subjects.decisions(self._job), send)

    async def _send(self, message: Outgoing, count: int) -> None:
        try:
            await self._bus.publish_whole([message], deadline_s=5)
        except StreamFull as error:  # clients miss these; of training, only late turns depend on them
            logger.error("%s: %d statuses are lost: %s", self._job, count, error)


class _Read(NamedTuple):
    statuses: list[FeedbackStatus]
    interactions: list[InteractionStatus]
    closed: list[tuple[str, str]]


async def recover_decisions(bus: Bus, job: str, *, since: float = math.inf) -> RecoveredDecisions:
    """Read the decisions published since ``since`` (Unix seconds), and at least the newest ones. Raises Unavailable."""
    read, leaders = _Read([], [], []), Leaders()
    async for message in _messages(bus, subjects.decisions(job), since):
        await asyncio.sleep(0)  # the lease is renewed meanwhile
        with contextlib.suppress(ProtocolError):  # written by another version: late turns begin new episodes
            batch, envelope = unpack(await data_of(bus, subjects.DECISIONS, message), FateBatch)
            if leaders.is_gone(job, envelope.epoch):
                continue
            read.statuses.extend(batch.items)
            read.interactions.extend(batch.interactions)
            read.closed.extend(batch.over)
    return await asyncio.to_thread(RecoveredDecisions.of, *read)


async def oldest_undecided_time(bus: Bus, job: str, interactions: int, feedback: int) -> float:
    """Return when the oldest message from these sequences on was stored, or infinity if there is none.

    Raises:
        Unavailable: the bus went away.
    """
    places = (
        (subjects.INTERACTIONS, subjects.interactions(job), interactions),
        (subjects.FEEDBACK, subjects.feedback(job), feedback),
    )
    since = math.inf
    for stream, subject, start in places:
        async with contextlib.aclosing(bus.scan(stream, subject, start_seq=start, headers_only=True)) as messages:
            async for message in messages:
                since = min(since, message.time)
                break
    return since


async def _messages(bus: Bus, subject: str, since: float) -> AsyncIterator[Message]:
    """Yield the newest messages, from ``since`` on or earlier."""
    newest = await bus.last(subjects.DECISIONS, subject)
    if newest is None:
        return
    first, size = (await bus.stream_state(subjects.DECISIONS)).first_seq, MIN_MESSAGES
    start = max(first, newest.seq + 1 - size)
    while start > first and since != math.inf and await _time_at(bus, subject, start) >= since:
        size *= 2
        start = max(first, start - size)
    async with contextlib.aclosing(bus.scan(subjects.DECISIONS, subject, start_seq=start)) as messages:
        async for message in messages:
            yield message


async def _time_at(bus: Bus, subject: str, seq: int) -> float:
    """Return when the first message from a sequence on was stored."""
    async with contextlib.aclosing(bus.scan(subjects.DECISIONS, subject, start_seq=seq, headers_only=True)) as messages:
        async for message in messages:
            return message.time
    return math.inf
