"""The desired state of a job, as its record says."""

from __future__ import annotations

from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.transport.bus import Bus

__all__ = ["is_wanted"]


async def is_wanted(bus: Bus, job: str) -> bool:
    """True if there is such a job and nobody wants it paused; False while the bus is away."""
    try:
        entry = await bus.kv(subjects.JOBS).get(job)
    except Unavailable:  # asked again soon
        return False
    if entry is None or entry.value is None:
        return False
    return JobRecord.model_validate_json(entry.value).desired_state != "paused"
