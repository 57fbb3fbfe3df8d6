"""Questions that only the coordinator that leads can answer, asked by the others of it over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.services.coordinator.leader import Leader
from penstock.shared.errors import NotFound, PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.runtime.lease import LeaseRecord
from penstock.shared.transport.bus import Bus

__all__ = ["COORDINATOR", "LeaderLine"]

COORDINATOR = "coordinator"
"""The lease of whoever leads."""
ASK_S = 1.0
HOLD_S = 120.0


class LeaderLine:
    """Waits of a job, wherever it is led: ``serve`` while leading, ``why`` on every replica."""

    def __init__(self, bus: Bus, runners: Mapping[str, Leader]) -> None:
        self._bus, self._runners = bus, runners

    async def serve(self) -> None:
        """Answer the others until cancelled."""
        async with (
            await self._bus.serve(subjects.LEADER, self._answer),
            await self._bus.serve(subjects.HOLD, self._hold),
        ):
            await asyncio.Event().wait()

    async def why(self, job: str) -> list[dict[str, Any]]:
        """Waits of a job, as its leader says; a row that says so where it has no leader yet."""
        rows = self._known(job)
        if rows is not None:
            return rows
        try:
            data = await self._bus.request(subjects.LEADER, job.encode(), deadline_s=ASK_S)
            return list(msgspec.json.decode(data))
        except PenstockError:
            return [await self._nobody()]

    def _known(self, job: str) -> list[dict[str, Any]] | None:
        runner = self._runners.get(job)
        return runner.why() if runner is not None else None

    async def _answer(self, data: bytes) -> bytes:
        job = data.decode(errors="replace")
        rows = self._known(job)
        if rows is None:
            raise NotFound(f"job '{job}' is not led here (yet)")
        return msgspec.json.encode(rows)

    async def _hold(self, data: bytes) -> bytes:
        """Keep what could be given up in the streams for some seconds (JSON), at most HOLD_S; the reply is empty."""
        self._bus.hold(min(float(msgspec.json.decode(data, type=float)), HOLD_S))
        return b""

    async def name(self) -> str:
        """Holder of the lease, and its epoch; it may have died since. Raises Unavailable."""
        entry = await self._bus.kv(subjects.LEASES).get(COORDINATOR)
        record = msgspec.json.decode(entry.value, type=LeaseRecord) if entry is not None and entry.value else None
        return f"{record.holder} (epoch {record.epoch})" if record is not None and record.holder else "nobody"

    async def _nobody(self) -> dict[str, Any]:
        return {
            "waiting_for": "a coordinator to lead this job",
            "subject": subjects.LEASES,
            "id": COORDINATOR,
            "holder": await self.name(),
            "age_s": 0.0,
        }
