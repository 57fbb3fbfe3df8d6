"""Whether the bus takes a write: a full disk answers questions as ever."""

from __future__ import annotations

import asyncio
import time

from penstock.shared.errors import PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus, Subscription

__all__ = ["WriteProbe"]

TRUST_S = 1.0
"""Health is asked for by anybody: no more than one write in this time."""
FULL_S = 10.0
"""What a publisher said of a full disk holds this long; as long as it tries, it says it again."""


class WriteProbe:
    """Writes an entry that expires by itself, for ``worker``; and hears of streams that have no room on the disk."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._bus = bus
        self._kv, self._key = bus.kv(subjects.ANSWERS), f"ready.{worker.encode().hex()}"
        self._until, self._flaw = 0.0, ""
        self._full = ("", float("-inf"))
        self._ears: Subscription | None = None
        self._asking = asyncio.Lock()

    async def flaw(self, deadline_s: float) -> str:
        """Why a write was not taken within ``deadline_s``; '' where it was, and no other stream refuses any."""
        async with self._asking:
            if self._ears is None:
                self._ears = await self._bus.subscribe(subjects.DISK_FULL, self._on_full)
            if time.monotonic() >= self._until:
                try:
                    await self._kv.put(self._key, b"", deadline_s=deadline_s)
                    self._flaw = ""
                except PenstockError as error:
                    self._flaw = str(error)
                self._until = time.monotonic() + TRUST_S
            stream, heard = self._full
            if not self._flaw and time.monotonic() < heard + FULL_S:
                return f"the disk of NATS is full: {stream} takes no message; free some space, and start NATS again"
            return self._flaw

    def _on_full(self, _: str, data: bytes) -> None:
        self._full = (data.decode("utf-8", "replace"), time.monotonic())
