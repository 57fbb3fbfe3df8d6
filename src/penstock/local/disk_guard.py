"""Restarts the NATS server of this machine once its full disk has room again.

A stream whose write failed accepts no message, even after there is room, until the server reads its files again. The
files contain all acknowledged messages. Publishers retry the requests that fail meanwhile.
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

POLL_S = 2.0
FAILED_WRITE = "write error"
"""Text in the server's error for a stream that accepts no more messages after a failed write."""
PATIENCE = 15
"""Number of consecutive checks that must report an error other than FAILED_WRITE (such as JetStream being off) before
the server is restarted. A server that is still opening its store is left alone."""
SETTLE_S = 5.0
ROOM_BYTES = 8 << 20
"""Enough space for the server to start and to write for a while."""


class DiskGuard:
    """Watches one NATS server that another task restarts; ``report`` receives messages about what it does."""

    def __init__(self, nats: NatsServer, report: Callable[[str], None]) -> None:
        self._nats, self._report = nats, report

    async def run(self) -> None:
        """Until cancelled: when the server reports a flaw, wait for disk space, then kill the server for a restart."""
        while True:
            self._report(
                f"nats: {await self._flaw()}; it is started again once there is room in {self._nats.directory}"
            )
            while not await asyncio.to_thread(has_room, self._nats.directory):
                await asyncio.sleep(POLL_S)
            self._report("nats: there is room; starting it again")
            self._end()
            await asyncio.sleep(SETTLE_S)

    async def _flaw(self) -> str:
        times = 0
        while True:
            await asyncio.sleep(POLL_S)
            flaw = "" if self._nats.starting else await asyncio.to_thread(self._nats.flaw)
            times = times + 1 if flaw else 0
            if FAILED_WRITE in flaw or times >= PATIENCE:
                return flaw

    def _end(self) -> None:
        """Kill the server. A clean stop could write the remains of a failed write from its memory to the disk."""
        if self._nats.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._nats.pid, signal.SIGKILL)


def has_room(folder: Path) -> bool:
    """Return True if ROOM_BYTES can be written to ``folder``, which also checks quotas. Blocks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
