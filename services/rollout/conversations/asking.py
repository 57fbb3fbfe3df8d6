"""Requests of one job to other services, repeated until somebody answers, and what work in hand waits for meanwhile."""

from __future__ import annotations

import asyncio

from penstock.shared.errors import Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.transport.bus import Bus

__all__ = ["Asking"]

ASK_DEADLINE_S = 5.0
"""A request is repeated under the same id after this long: its server may be gone, or just slow."""
RETRY_S = 0.2


class Asking:
    """Asks on behalf of pieces of work, each named by a key."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waits: dict[str, tuple[float, str, str]] = {}

    def wait(self, key: str, what: str, subject: str) -> None:
        """A piece of work waits for something; it may be told again and again."""
        self._waits.setdefault(key, (bus_time(), what, subject))

    def done(self, key: str) -> None:
        """This piece of work waits no more. Safe to repeat."""
        self._waits.pop(key, None)

    @property
    def oldest(self) -> tuple[float, str, str] | None:
        """Since when (Unix seconds) a piece of work has waited, for what, on which subject: the longest wait."""
        return min(self._waits.values(), default=None)

    async def ask(self, subject: str, data: bytes, key: str, what: str) -> bytes:
        """Request/reply, again until somebody answers; the deadline of the work bounds it."""
        while True:
            try:
                reply = await self._bus.request(subject, data, deadline_s=ASK_DEADLINE_S)
            except Unavailable:
                self.wait(key, what, subject)
                await asyncio.sleep(RETRY_S)
            else:
                self.done(key)
                return reply
