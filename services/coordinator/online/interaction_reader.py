"""Reads interactions from their stream, by sequence or by name, and waits while the bus is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec

from penstock.services.coordinator.online.examples import InteractionRecord
from penstock.services.coordinator.online.statuses import DecidedNames
from penstock.services.coordinator.payload import whole_of
from penstock.services.coordinator.training.retry import Retry
from penstock.shared.errors import NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import Interaction
from penstock.shared.transport.bus import Bus

__all__ = ["InteractionReader"]

LOOKUP = "a look at interactions"
AT_ONCE = 64
"""Interactions looked up at once: clients choose the names in feedback, and each name is a request."""
T = TypeVar("T", bound=msgspec.Struct)


class InteractionReader:
    """Reads interactions that the leader read long ago.

    Args:
        retry: returns the wait to report while the bus is away.
    """

    def __init__(self, bus: Bus, job: str, retry: Callable[[], Retry]) -> None:
        self._bus, self._job, self._retry = bus, job, retry
        self._missing = DecidedNames()
        """Names without a usable record: posting them again costs no further request."""

    async def by_seq(self, seqs: Iterable[int]) -> dict[int, Interaction]:
        """Return the records that still exist at these sequences."""
        get = partial(self._bus.get_whole, subjects.INTERACTIONS, sorted(seqs))
        found = await self._retry().until_taken(LOOKUP, subjects.interactions(self._job), get)
        return {seq: unpack(message.data, Interaction)[0] for seq, message in found.items()}

    async def by_name(self, names: Iterable[str]) -> dict[str, InteractionRecord]:
        """Return the facts of the interactions that exist under these canonical names; a missing name is looked up
        once."""
        to_find = [name for name in dict.fromkeys(names) if name not in self._missing]
        found = dict[str, InteractionRecord | None]()
        if to_find:
            find_one = partial(self._find_all, to_find, found)
            await self._retry().until_taken(LOOKUP, subjects.interactions(self._job), find_one)
        self._missing.add_all({name: "" for name, record in found.items() if record is None})
        return {name: record for name, record in found.items() if record is not None}

    def on_interaction(self, name: str) -> None:
        """Note that the leader has read an interaction with this canonical name."""
        self._missing.discard(name)

    async def _find_all(self, names: Iterable[str], found: dict[str, InteractionRecord | None]) -> None:
        """Look up the names that ``found`` lacks. Raises Unavailable with some of them missing."""
        window = asyncio.Semaphore(AT_ONCE)

        async def find_one(name: str) -> None:
            async with window:
                found[name] = await self._find(name)

        try:
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    if name not in found:
                        tasks.create_task(find_one(name))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _find(self, name: str) -> InteractionRecord | None:
        message = await self._bus.last(subjects.INTERACTIONS, subjects.interaction(self._job, name))
        if message is None:
            return None
        with contextlib.suppress(ProtocolError, NotFound):  # an unreadable record is useless
            return InteractionRecord.of(
                message.seq, await whole_of(self._bus, subjects.INTERACTIONS, message, Interaction)
            )
        return None
