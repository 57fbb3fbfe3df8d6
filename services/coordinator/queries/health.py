"""Health of the deployment: connection to the bus, a test write, the leading coordinator, and the sizes of the
streams."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from penstock.services.coordinator.leader.leader_rpc import LeaderRpc
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import durability, flaw

__all__ = ["Health", "WriteProbe"]

TRUST_S = 1.0
"""Seconds for which the result of a probe is reused: any client may query the health, but writes must stay rare."""


class Health:
    """Checks if this coordinator can serve, and describes its storage."""

    def __init__(self, bus: Bus, leader: LeaderRpc, settings: ServiceSettings) -> None:
        self._bus, self._leader, self._settings = bus, leader, settings
        self._probe = WriteProbe(bus, settings.worker_id, settings.nats_monitor_url)

    async def check(self) -> tuple[bool, dict[str, Any]]:
        """Return readiness to serve, and ``{check: {"ok": bool, "detail": str}}``. Takes at most 1 s; never raises."""
        checks: dict[str, Any] = {
            "nats": {"ok": self._bus.connected, "detail": "connected" if self._bus.connected else "no connection"}
        }
        try:
            async with asyncio.timeout(0.8):
                found = await self._probe.flaw(0.5)
                checks["write"] = {"ok": not found, "detail": found or "taken"}
                state = await self._bus.stream_state(subjects.LEDGER)
                checks["leader"] = {"ok": True, "detail": await self._leader.name()}
            checks["ledger"] = {"ok": True, "detail": f"{state.messages} entries"}
        except (PenstockError, TimeoutError) as error:
            checks["ledger"] = {"ok": False, "detail": str(error) or "the ledger stream does not answer"}
        return all(check["ok"] for check in checks.values()), checks

    async def limits(self) -> dict[str, Any]:
        """Return values for ``GET /v1/limits``: ``durability`` (fsync|page-cache|unverified), and sizes in bytes."""
        return {
            "durability": await durability(self._settings.nats_monitor_url),
            "experience_bytes": self._settings.experience_bytes,
            "ledger_bytes": self._settings.ledger_size,
            "stream_bytes": self._settings.stream_bytes,
        }


class WriteProbe:
    """Tests if the bus can store data: writes an entry that expires, and asks the server's monitor about all
    streams."""

    def __init__(self, bus: Bus, worker: str, monitor_url: str | None = None) -> None:
        self._kv, self._key = bus.kv(subjects.ANSWERS), f"ready.{worker.encode().hex()}"
        self._monitor_url = monitor_url
        self._until, self._flaw = 0.0, ""
        self._asking = asyncio.Lock()

    async def flaw(self, deadline_s: float) -> str:
        """Return the error that the server's monitor reports or that the test write raised within ``deadline_s``; '' if
        there is none."""
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
