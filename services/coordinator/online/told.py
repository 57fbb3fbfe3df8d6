"""What DECISIONS tells a new leader that neither the ledger nor the streams say."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import NamedTuple

from penstock.services.coordinator.feedback.leaders import Leaders
from penstock.services.coordinator.feedback.pieces import data_of
from penstock.services.coordinator.online.recalled import Told
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.interaction import Fate, FateBatch, InteractionFate
from penstock.shared.transport.bus import Bus, Message

__all__ = ["told_of", "undecided_since"]

NEWEST = 5_000
"""At least so many of the newest messages are read."""


class _Read(NamedTuple):
    fates: list[Fate]
    interactions: list[InteractionFate]
    over: list[tuple[str, str]]


async def told_of(bus: Bus, job: str, *, since: float = math.inf) -> Told:
    """What was told of a job since then (Unix seconds), and before as far as NEWEST reaches. Raises Unavailable."""
    read, leaders = _Read([], [], []), Leaders()
    async for message in _messages(bus, subjects.decisions(job), since):
        await asyncio.sleep(0)  # the lease is renewed meanwhile
        with contextlib.suppress(ProtocolError):  # of another version: late turns are new episodes, as they were before
            batch, envelope = unpack(await data_of(bus, subjects.DECISIONS, message), FateBatch)
            if leaders.is_gone(job, envelope.epoch):
                continue
            read.fates.extend(batch.items)
            read.interactions.extend(batch.interactions)
            read.over.extend(batch.over)
    return await asyncio.to_thread(Told.of, *read)


async def undecided_since(bus: Bus, job: str, interactions: int, feedback: int) -> float:
    """When the oldest message was stored that is read again from these sequences on; infinity: there is none.

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
    """The newest ones, as far back as ``since`` asks for, one after another."""
    newest = await bus.last(subjects.DECISIONS, subject)
    if newest is None:
        return
    first, size = (await bus.stream_state(subjects.DECISIONS)).first_seq, NEWEST
    start = max(first, newest.seq + 1 - size)
    while start > first and since != math.inf and await _time_at(bus, subject, start) >= since:
        size *= 2
        start = max(first, start - size)
    async with contextlib.aclosing(bus.scan(subjects.DECISIONS, subject, start_seq=start)) as messages:
        async for message in messages:
            yield message


async def _time_at(bus: Bus, subject: str, seq: int) -> float:
    """When the first message from a sequence on was stored."""
    async with contextlib.aclosing(bus.scan(subjects.DECISIONS, subject, start_seq=seq, headers_only=True)) as messages:
        async for message in messages:
            return message.time
    return math.inf
