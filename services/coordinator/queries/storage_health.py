"""Health of the bus's storage: whether it accepts writes, and the fill level of LEDGER."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from penstock.services.coordinator.leader.why import wait_row
from penstock.services.coordinator.problems import HttpProblem
from penstock.shared.errors import PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus, StreamState
from penstock.shared.transport.server import flaw

__all__ = [
    "FILLING_SHARE",
    "RESERVED_SHARE",
    "WriteProbe",
    "describe_ledger",
    "is_filling",
    "ledger_waits",
    "reserve_ledger",
]

FILLING_SHARE = 0.7
"""Fill level from which users are warned."""
RESERVED_SHARE = 0.9
"""Fill level from which the rest is reserved for running jobs: new jobs are refused."""
TRUST_S = 1.0
"""Seconds for which a result is reused, since anyone may query the health: at most one write in this time."""
ADVICE = (
    "see that its archive can be written (ledgers/ in the data directory), delete finished jobs (penstock rm JOB), or "
    "raise PENSTOCK_LEDGER_BYTES and restart the coordinator"
)


def is_filling(state: StreamState) -> bool:
    """Return True if users should free space."""
    return state.max_bytes > 0 and state.bytes >= FILLING_SHARE * state.max_bytes


def describe_ledger(state: StreamState) -> str:
    """Describe the fill level, and the remedy."""
    return f"LEDGER is {state.bytes / state.max_bytes:.0%} full ({state.bytes} of {state.max_bytes} bytes): {ADVICE}"


async def ledger_waits(bus: Bus) -> list[dict[str, Any]]:
    """Return the wait row of a filling ledger: jobs continue until it is full. Raises Unavailable."""
    state = await bus.stream_state(subjects.LEDGER)
    if not is_filling(state):
        return []
    return [wait_row(f"soon: room in the ledger. {describe_ledger(state)}", subjects.LEDGER, subjects.LEDGER)]


async def reserve_ledger(bus: Bus) -> None:
    """Refuse a new job if only reserved space is left.

    Raises:
        HttpProblem: 507 the ledger has no space for another job.
        Unavailable: the bus does not answer.
    """
    state = await bus.stream_state(subjects.LEDGER)
    if state.max_bytes > 0 and state.bytes >= RESERVED_SHARE * state.max_bytes:
        raise HttpProblem(507, "ledger_full", f"{describe_ledger(state)}; what is left is kept for the jobs that run")


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
