"""Health of the deployment: is the bus connected, does it take writes, and who leads; and the sizes of its streams."""

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
"""Seconds for which a result is reused, since anyone may query the health: at most one write in this time."""


class Health:
    """Answers whether this coordinator can serve, and with which storage."""

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
        """Return facts for ``GET /v1/limits``: ``durability`` (fsync|page-cache|unverified), sizes in bytes."""
        return {
            "durability": await durability(self._settings.nats_monitor_url),
            "experience_bytes": self._settings.experience_bytes,
            "ledger_bytes": self._settings.ledger_size,
            "stream_bytes": self._settings.stream_bytes,
        }


class WriteProbe:
    """Probe that writes a self-expiring entry for ``worker``, and queries the server's monitor about all streams."""

    def __init__(self, bus: Bus, worker: str, monitor_url: str | None = None) -> None:
        self._kv, self._key = bus.kv(subjects.ANSWERS), f"ready.{worker.encode().hex()}"
        self._monitor_url = monitor_url
        self._until, self._flaw = 0.0, ""
        self._asking = asyncio.Lock()

    async def flaw(self, deadline_s: float) -> str:
        """Return the storage's flaw: a write that failed within ``deadline_s`` or the monitor's report; '' for none."""
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
