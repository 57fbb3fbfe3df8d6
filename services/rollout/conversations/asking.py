"""Sends the requests of one job to other services until they are answered, and reports the oldest open wait."""

from __future__ import annotations

import asyncio

from penstock.shared.errors import Unavailable
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.transport.bus import Bus

__all__ = ["Asking"]

ASK_DEADLINE_S = 5.0
"""Timeout after which a request is repeated under the same id, because its server may be lost or slow."""
RETRY_S = 0.2


class Asking:
    """Sends requests for pieces of work (such as tickets), each identified by a key, and records how long they wait."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waits: dict[str, tuple[float, str, str]] = {}

    def wait(self, key: str, what: str, subject: str) -> None:
        """Record that a piece of work waits for ``what`` from now on. Further calls before ``done`` change nothing."""
        self._waits.setdefault(key, (bus_time(), what, subject))

    def done(self, key: str) -> None:
        """Record that a piece of work no longer waits. Safe to repeat."""
        self._waits.pop(key, None)

    @property
    def oldest(self) -> tuple[float, str, str] | None:
        """The longest wait: its start (Unix seconds), what the work waits for, and the bus subject; None if nothing
        waits."""
        return min(self._waits.values(), default=None)

    async def ask(self, subject: str, data: bytes, key: str, what: str) -> bytes:
        """Send a request, retry until it is answered, and return the reply. The caller's deadline bounds the wait.

        Args:
            key: identifies the work for which the request is sent.
            what: what this work waits for, for the heartbeat.
        """
        while True:
            try:
                reply = await self._bus.request(subject, data, deadline_s=ASK_DEADLINE_S)
            except Unavailable:
                self.wait(key, what, subject)
                await asyncio.sleep(RETRY_S)
            else:
                self.done(key)
                return reply
