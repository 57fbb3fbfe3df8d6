"""Checks whether the bus accepts writes, because a server with a full disk still answers requests."""

from __future__ import annotations

import asyncio
import time

from penstock.shared.errors import PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import flaw

__all__ = ["WriteProbe"]

TRUST_S = 1.0
"""Anybody may ask for the health: at most one write in this time."""


class WriteProbe:
    """Writes an entry that expires by itself, for ``worker``, and asks the server's monitor about all streams."""

    def __init__(self, bus: Bus, worker: str, monitor_url: str | None = None) -> None:
        self._kv, self._key = bus.kv(subjects.ANSWERS), f"ready.{worker.encode().hex()}"
        self._monitor_url = monitor_url
        self._until, self._flaw = 0.0, ""
        self._asking = asyncio.Lock()

    async def flaw(self, deadline_s: float) -> str:
        """Return why writes are refused; '' if one succeeded within ``deadline_s`` and the monitor reports no flaw."""
        async with self._asking:
            if time.monotonic() >= self._until:
                said, refused = await asyncio.gather(
                    flaw(self._monitor_url, deadline_s=deadline_s), self._refused(deadline_s)
                )
                self._flaw = f"NATS says: {said}" if said else refused
                self._until = time.monotonic() + TRUST_S
            return self._flaw

    async def _refused(self, deadline_s: float) -> str:
        try:
            await self._kv.put(self._key, b"", deadline_s=deadline_s)
        except PenstockError as error:
            return str(error)
        return ""
