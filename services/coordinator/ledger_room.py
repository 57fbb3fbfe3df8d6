"""Watches the fill level of LEDGER: old entries move to the archive, and deleting jobs frees space."""

from __future__ import annotations

from typing import Any

from penstock.services.coordinator.api.replies import HttpProblem
from penstock.services.coordinator.why import wait_row
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus, StreamState

__all__ = ["FILLING_SHARE", "RESERVED_SHARE", "describe_ledger", "is_filling", "ledger_waits", "reserve_ledger"]

FILLING_SHARE = 0.7
"""From this share on users are warned."""
RESERVED_SHARE = 0.9
"""From this share on the rest is reserved for running jobs: no new job is accepted."""
ADVICE = (
    "see that its archive can be written (ledgers/ in the data directory), delete finished jobs (penstock rm JOB), or "
    "raise PENSTOCK_LEDGER_BYTES and restart the coordinator"
)


def is_filling(state: StreamState) -> bool:
    """Return True if users should free space."""
    return state.max_bytes > 0 and state.bytes >= FILLING_SHARE * state.max_bytes


def describe_ledger(state: StreamState) -> str:
    """Describe the fill level, and what to do about it."""
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
        HttpProblem: 507, the job is not accepted.
        Unavailable: the bus does not answer.
    """
    state = await bus.stream_state(subjects.LEDGER)
    if state.max_bytes > 0 and state.bytes >= RESERVED_SHARE * state.max_bytes:
        raise HttpProblem(507, "ledger_full", f"{describe_ledger(state)}; what is left is kept for the jobs that run")
