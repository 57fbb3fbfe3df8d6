"""Fill levels of the stream LEDGER: above the lower level users are warned, above the higher level new jobs are
refused."""

from __future__ import annotations

from penstock.shared.errors import NoRoom
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus, StreamState

__all__ = ["FILLING_SHARE", "RESERVED_SHARE", "describe_ledger", "is_filling", "reserve_ledger"]

FILLING_SHARE = 0.7
"""Fill level from which users are warned."""
RESERVED_SHARE = 0.9
"""Fill level from which new jobs are refused; running jobs may use the rest."""
ADVICE = (
    "see that its archive can be written (ledgers/ in the data directory), delete finished jobs (penstock rm JOB), or "
    "raise PENSTOCK_LEDGER_BYTES and restart the coordinator"
)


def is_filling(state: StreamState) -> bool:
    """Return True if LEDGER is so full that users should free space."""
    return state.max_bytes > 0 and state.bytes >= FILLING_SHARE * state.max_bytes


def describe_ledger(state: StreamState) -> str:
    """Return a text for users: the fill level of LEDGER, and how to free space."""
    return f"LEDGER is {state.bytes / state.max_bytes:.0%} full ({state.bytes} of {state.max_bytes} bytes): {ADVICE}"


async def reserve_ledger(bus: Bus) -> None:
    """Refuse a new job if all free space of LEDGER is reserved for running jobs.

    Raises:
        NoRoom: the ledger has no space for another job.
        Unavailable: the bus does not answer.
    """
    state = await bus.stream_state(subjects.LEDGER)
    if state.max_bytes > 0 and state.bytes >= RESERVED_SHARE * state.max_bytes:
        raise NoRoom("ledger_full", f"{describe_ledger(state)}; what is left is kept for the jobs that run")
