"""Has the NATS of this machine started again once its full disk has room.

A stream whose write failed takes no message from then on, however much room there is, until the server reads its files
anew. What was acknowledged is in them; publishers try again until it is.
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
SETTLE_S = 5.0
"""After a start; a disk that is full again is heard of then."""
OFF_TIMES = 3
"""JetStream is off if it is found so this often in a row."""
ROOM_BYTES = 8 << 20
"""Enough for the server to start and to write a while."""


class DiskGuard:
    """Watches one server, which is kept alive by somebody else; ``tell`` hears what is done."""

    def __init__(self, nats: NatsServer, tell: Callable[[str], None]) -> None:
        self._nats, self._tell = nats, tell
        self._full = asyncio.Event()
        self._stream = ""

    def on_full(self, subject: str, data: bytes) -> None:
        """A message on ``subjects.DISK_FULL``."""
        self._stream = data.decode("utf-8", "replace")
        self._full.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            trouble = await self._trouble()
            self._tell(f"nats: {trouble}; free some space in {self._nats.directory}: then it is started again")
            while not await asyncio.to_thread(has_room, self._nats.directory):
                await asyncio.sleep(LOOK_S)
            self._tell("nats: there is room again; starting it again")
            self._end()
            await asyncio.sleep(SETTLE_S)
            self._full.clear()

    async def _trouble(self) -> str:
        off = 0
        while off < OFF_TIMES:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._full.wait()
                    return f"its disk is full, {self._stream} takes no message"
            off = 0 if await asyncio.to_thread(self._nats.serves_streams) else off + 1
        return "it has switched JetStream off, as it does when its disk is full"

    def _end(self) -> None:
        """As a crash would: nothing of what it has in memory of a failed write gets to the disk."""
        if self._nats.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._nats.pid, signal.SIGKILL)


def has_room(folder: Path) -> bool:
    """Whether some MiB can be written there; quotas count, too. Blocks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
