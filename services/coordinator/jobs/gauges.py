"""Prometheus gauges of the coordinator: metrics of the jobs that it leads, fill levels of streams, versions of
workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping

from penstock.services.coordinator.jobs.members import Member, Members
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.runtime import metrics
from penstock.shared.transport.bus import Bus

__all__ = ["JobGauges", "StreamGauges"]

VALUES = metrics.gauge("job_metric", "Newest value of a metric of a job that is led here.", ["job", "metric"])
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


class JobGauges:
    """Gauges of one job's metrics. They show the newest row of each kind: values that a new row lacks are removed."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._shown: dict[str, frozenset[str]] = {}

    def show(self, kind: str, values: Mapping[str, float]) -> None:
        """Export the values of a new row of metrics; ``kind``: `train` or `eval`."""
        for name in self._shown.get(kind, frozenset()) - values.keys():
            VALUES.remove(self._job, name)
        for name, value in values.items():
            VALUES.labels(self._job, name).set(value)
        self._shown[kind] = frozenset(values)

    def hide(self) -> None:
        """Remove all values, because this coordinator no longer leads the job."""
        for kind in self._shown:
            self.show(kind, {})


class StreamGauges:
    """Gauges of streams and of policy versions, refreshed every few seconds."""

    def __init__(self, bus: Bus, members: Members) -> None:
        self._bus, self._members = bus, members
        self._shown: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Refresh the gauges until cancelled."""
        while True:
            with contextlib.suppress(Unavailable):  # the last values stay; other metrics show that the bus is away
                await self._refresh_streams()
            self._show(oldest_versions(self._members.everybody(), time.monotonic()))
            await asyncio.sleep(EVERY_S)

    async def _refresh_streams(self) -> None:
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
    """Return the oldest policy version among the live workers, by job and service."""
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
