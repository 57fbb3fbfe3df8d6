"""Has the NATS of this machine started again once its full disk has room.

A stream whose write failed takes no message from then on, however much room there is, until the server reads its files
anew. What was acknowledged is in them; publishers, who get no answer meanwhile, try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.shared.transport.server import NatsServer

__all__ = ["DiskGuard", "has_room"]

LOOK_S = 2.0
FAILED_WRITE = "write error"
"""In what the server says of a stream that takes nothing any more."""
PATIENCE = 15
"""Anything else (JetStream is off) has to be said this often in a row; one that still opens its store is let be."""
SETTLE_S = 5.0
ROOM_BYTES = 8 << 20
"""Enough for the server to start and to write a while."""


class DiskGuard:
    """Watches one server, which is kept alive by somebody else; ``tell`` hears what is done."""

    def __init__(self, nats: NatsServer, tell: Callable[[str], None]) -> None:
        self._nats, self._tell = nats, tell

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._tell(f"nats: {await self._flaw()}; it is started again once there is room in {self._nats.directory}")
            while not await asyncio.to_thread(has_room, self._nats.directory):
                await asyncio.sleep(LOOK_S)
            self._tell("nats: there is room; starting it again")
            self._end()
            await asyncio.sleep(SETTLE_S)

    async def _flaw(self) -> str:
        times = 0
        while True:
            await asyncio.sleep(LOOK_S)
            flaw = "" if self._nats.starting else await asyncio.to_thread(self._nats.flaw)
            times = times + 1 if flaw else 0
            if FAILED_WRITE in flaw or times >= PATIENCE:
                return flaw

    def _end(self) -> None:
        """As a crash would: nothing of what it has in memory of a failed write gets to the disk."""
        if self._nats.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._nats.pid, signal.SIGKILL)


def has_room(folder: Path) -> bool:
    """True if some MiB can be written there; quotas count, too. Blocks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
