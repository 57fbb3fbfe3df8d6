"""Requests between coordinators: any replica can ask the leader of a job what the job waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from penstock.shared.errors import NotFound, PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.runtime.lease import LeaseRecord
from penstock.shared.transport.bus import Bus

__all__ = ["COORDINATOR", "Leader", "LeaderRpc"]

COORDINATOR = "coordinator"
"""Name of the lease that the leading coordinator holds."""
ASK_S = 1.0
HOLD_S = 120.0


class Leader(Protocol):
    """A task that leads one job, of any kind, from ``lead`` to its end."""

    ready: bool
    """True once the leader has recovered and makes decisions."""

    async def lead(self) -> None:
        """Lead until the job has ended. Raises Fenced when another coordinator leads."""
        ...

    def update_record(self, record: JobRecord) -> None:
        """Apply a changed record of the job."""
        ...

    def wake(self) -> None:
        """Check the job now, because workers joined."""
        ...

    def why(self) -> list[dict[str, Any]]:
        """Return a row for each thing that the job waits for, also before the leader is ready."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the job's entry in the heartbeat: ``version`` of the policy, and ``running``, the work in flight."""
        ...

    async def on_dead_message(self, stream: str, seq: int, draw: Draw | None, *, reason: str, attempts: int) -> None:
        """Copy a dead message of a work queue to DEAD, and end its draw."""
        ...


class LeaderRpc:
    """Lets every replica ask the leader of a job what the job waits for: ``serve`` runs on the leader, ``why`` on every
    replica."""

    def __init__(self, bus: Bus, runners: Mapping[str, Leader]) -> None:
        self._bus, self._runners = bus, runners

    async def serve(self) -> None:
        """Answer requests of other replicas until cancelled."""
        async with (
            await self._bus.serve(subjects.LEADER, self._answer),
            await self._bus.serve(subjects.HOLD, self._hold),
        ):
            await asyncio.Event().wait()

    async def why(self, job: str) -> list[dict[str, Any]]:
        """Return what the job waits for, as its leader reports it, or a row saying that the job has no leader yet."""
        rows = self._known(job)
        if rows is not None:
            return rows
        try:
            data = await self._bus.request(subjects.LEADER, job.encode(), deadline_s=ASK_S)
            return list(msgspec.json.decode(data))
        except PenstockError:
            return [await self._no_leader()]

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
        """Pause the purging of streams, for at most HOLD_S seconds; ``data`` contains the requested seconds as JSON.
        Return an empty reply."""
        self._bus.hold(min(float(msgspec.json.decode(data, type=float)), HOLD_S))
        return b""

    async def name(self) -> str:
        """Return the holder and the epoch of the coordinators' lease as text, or `nobody`. The holder may have died
        since it took the lease.

        Raises:
            Unavailable: the bus does not answer.
        """
        entry = await self._bus.kv(subjects.LEASES).get(COORDINATOR)
        record = msgspec.json.decode(entry.value, type=LeaseRecord) if entry is not None and entry.value else None
        return f"{record.holder} (epoch {record.epoch})" if record is not None and record.holder else "nobody"

    async def _no_leader(self) -> dict[str, Any]:
        return {
            "waiting_for": "a coordinator to lead this job",
            "subject": subjects.LEASES,
            "id": COORDINATOR,
            "holder": await self.name(),
            "age_s": 0.0,
        }
