"""Reads interactions out of their stream, by sequence or by name; waits while the bus is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec

from penstock.services.coordinator.online.material import Record
from penstock.services.coordinator.online.remembered import Remembered
from penstock.services.coordinator.payload import whole_of
from penstock.services.coordinator.retry import Retry
from penstock.shared.errors import NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.interaction import Interaction
from penstock.shared.transport.bus import Bus

__all__ = ["Lookups"]

LOOK_UP = "a look at interactions"
AT_ONCE = 64
"""Interactions that are looked up at a time: feedback names what it likes, and each name is a request."""

T = TypeVar("T", bound=msgspec.Struct)


class Lookups:
    """Interactions of one job that were read long ago.

    Args:
        retry: says what is waited for while the bus is away.
    """

    def __init__(self, bus: Bus, job: str, retry: Callable[[], Retry]) -> None:
        self._bus, self._job, self._retry = bus, job, retry
        self._missing = Remembered()
        """Names that nothing usable was found under: whoever posts them again makes no more requests."""

    async def by_seq(self, seqs: Iterable[int]) -> dict[int, Interaction]:
        """Those of these sequences that are there."""
        get = partial(self._bus.get_whole, subjects.INTERACTIONS, sorted(seqs))
        found = await self._retry().until_taken(LOOK_UP, subjects.interactions(self._job), get)
        return {seq: unpack(message.data, Interaction)[0] for seq, message in found.items()}

    async def by_name(self, names: Iterable[str]) -> dict[str, Record]:
        """What is known of those of these (canonical) names that are there; for what is not the bus is asked once."""
        wanted = [name for name in dict.fromkeys(names) if name not in self._missing]
        found = dict[str, Record | None]()
        if wanted:
            look = partial(self._look_for, wanted, found)
            await self._retry().until_taken(LOOK_UP, subjects.interactions(self._job), look)
        self._missing.update({name: "" for name, record in found.items() if record is None})
        return {name: record for name, record in found.items() if record is not None}

    def heard(self, name: str) -> None:
        """The interaction of this (canonical) name was read now: it can be found from here on."""
        self._missing.forget(name)

    async def _look_for(self, names: Iterable[str], found: dict[str, Record | None]) -> None:
        """Look for those of these that are not among ``found`` yet. Raises Unavailable: some are not looked for."""
        window = asyncio.Semaphore(AT_ONCE)

        async def look(name: str) -> None:
            async with window:
                found[name] = await self._look(name)

        try:
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    if name not in found:
                        tasks.create_task(look(name))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _look(self, name: str) -> Record | None:
        message = await self._bus.last(subjects.INTERACTIONS, subjects.interaction(self._job, name))
        if message is None:
            return None
        with contextlib.suppress(ProtocolError, NotFound):  # then nobody can use it
            return Record.of(message.seq, await whole_of(self._bus, subjects.INTERACTIONS, message, Interaction))
        return None
