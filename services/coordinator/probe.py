"""Whether the bus takes a write: a full disk answers questions as ever."""

from __future__ import annotations

import asyncio
import time

from penstock.shared.errors import PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus

__all__ = ["WriteProbe"]

TRUST_S = 1.0
"""Health is asked for by anybody: no more than one write in this time."""


class WriteProbe:
    """Writes an entry that expires by itself, for ``worker``."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._kv, self._key = bus.kv(subjects.ANSWERS), f"ready.{worker.encode().hex()}"
        self._until, self._flaw = 0.0, ""
        self._asking = asyncio.Lock()

    async def flaw(self, deadline_s: float) -> str:
        """Why a write was not taken within ``deadline_s``; '' where it was."""
        async with self._asking:
            if time.monotonic() >= self._until:
                try:
                    await self._kv.put(self._key, b"", deadline_s=deadline_s)
                    self._flaw = ""
                except PenstockError as error:
                    self._flaw = str(error)
                self._until = time.monotonic() + TRUST_S
            return self._flaw
