"""How full the streams are, and how far each service is behind the policy, for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from penstock.services.coordinator.members import Member, Members
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.runtime import metrics
from penstock.shared.transport.bus import Bus

__all__ = ["Levels"]

EVERY_S = 5.0
STREAMS = (
    subjects.TICKETS, subjects.RAW, subjects.EXPERIENCE, subjects.BATCHES, subjects.LEDGER, subjects.EVENTS,
    subjects.METRICS, subjects.INTERACTIONS, subjects.FEEDBACK, subjects.DECISIONS, subjects.DEAD,
)  # fmt: skip

MESSAGES = metrics.gauge("queue_messages", "Messages that a stream holds.", ["stream"])
FILLED = metrics.gauge("queue_filled_ratio", "Bytes of a stream, of those that it may have.", ["stream"])
VERSION = metrics.gauge(
    "policy_version", "Oldest policy version that a live worker of a service has.", ["job", "service"]
)


class Levels:
    """Looks every few seconds. ``run`` until cancelled."""

    def __init__(self, bus: Bus, members: Members) -> None:
        self._bus, self._members = bus, members
        self._shown: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Keep the gauges up to date."""
        while True:
            with contextlib.suppress(Unavailable):  # what was seen last stands; others tell that the bus is away
                await self._look_at_streams()
            self._show(oldest_versions(self._members.everybody(), time.monotonic()))
            await asyncio.sleep(EVERY_S)

    async def _look_at_streams(self) -> None:
        for name in STREAMS:
            state = await self._bus.stream_state(name)
            MESSAGES.labels(name.lower()).set(state.messages)
            FILLED.labels(name.lower()).set(state.bytes / state.max_bytes if state.max_bytes > 0 else 0.0)

    def _show(self, versions: dict[tuple[str, str], int]) -> None:
        for gone in self._shown - versions.keys():
            VERSION.remove(*gone)
        for (job, service), version in versions.items():
            VERSION.labels(job, service).set(version)
        self._shown = set(versions)


def oldest_versions(members: Iterable[Member], clock: float) -> dict[tuple[str, str], int]:
    """By job and service, the oldest policy version that a live worker has."""
    found: dict[tuple[str, str], int] = {}
    for member in members:
        if not member.alive(clock):
            continue
        for job, row in member.beat.jobs.items():
            version = row.get("version")
            if isinstance(version, int):
                key = job, member.beat.service
                found[key] = min(version, found.get(key, version))
    return found
