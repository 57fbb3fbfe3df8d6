"""Leads one deployment: the deployment runs once a rollout worker has loaded the model, and ends on cancellation or
when idle.

There is no ledger and nothing to recover: workers serve by the job's record alone, whichever coordinator leads.
"""

from __future__ import annotations

import time
from typing import Any

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.ledgerless_runner import LedgerlessRunner
from penstock.services.coordinator.leader.why import blocked_waits, wait_row, worker_waits
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime, bus_time
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord, Phase
from penstock.shared.transport.bus import Bus

__all__ = ["ServingRunner"]

POLL_S = 0.5
"""Interval at which heartbeats of the workers are checked (seconds)."""


class ServingRunner(LedgerlessRunner):
    """The leader's task for one deployment; ends when the job does."""

    def __init__(self, bus: Bus, store: JobStore, members: Members, record: JobRecord, *, epoch: int) -> None:
        super().__init__(bus, store, members, record, epoch=epoch)
        self.config = ServingJob.parse(record.spec)
        self.ready = True
        self._served = record.status.phase == "running"
        self._seen: dict[str, int] = {}
        self._active, self._started_at = time.monotonic(), record.status.started_at

    async def lead(self) -> None:
        """Watch the workers until the deployment ends."""
        async with self._running():
            while (end := self._end()) is None:
                self._report("running" if self._served else "pending", self._message())
                await self._until_changed(POLL_S)
                self._update_activity(time.monotonic())
            self._report(*end)

    def _entries(self, clock: float) -> dict[str, dict[str, Any]]:
        """Return, by worker, the entry about this job in each live rollout worker's heartbeat; leave out workers
        without an entry."""
        found = {m.beat.worker: m.beat.jobs.get(self.job, {}) for m in self.members.of("rollout", clock)}
        return {worker: entry for worker, entry in found.items() if entry}

    def _update_activity(self, clock: float) -> None:
        """Read from the workers' heartbeats whether a worker serves the model by now, and update the time of the last
        activity: a request, new tokens, or the start of serving."""
        entries = self._entries(clock)
        tokens = {worker: int(entry.get("generated_tokens", 0)) for worker, entry in entries.items()}
        serves = any(int(entry.get("version", -1)) >= 0 for entry in entries.values())
        is_asked = any(int(entry.get("requests", 0)) for entry in entries.values())
        if is_asked or tokens != self._seen or (serves and not self._served):
            self._active = clock
        self._seen = tokens
        self._served = self._served or serves

    def _end(self) -> tuple[Phase, str] | None:
        """Return the terminal phase and its reason, or None while the deployment continues."""
        idle_s = self.config.serving.idle_s
        if self.record.desired_state == "cancelled":
            return "cancelled", ""
        if self._failure is not None:
            return "failed", self._failure.message
        if idle_s is not None and time.monotonic() - self._active > idle_s:
            return "succeeded", f"nobody asked for {idle_s:g} s, so its slots were given back"
        return None

    def _message(self) -> str:
        workers = sum(int(e.get("version", -1)) >= 0 for e in self._entries(time.monotonic()).values())
        origin = self.record.origin
        what = origin.checkpoint if origin is not None else str(self.config.model.path or "a model of random weights")
        if not workers:
            return f"no rollout worker has {what} in memory yet"
        return f"{workers} rollout worker{'s' if workers > 1 else ''} serve{'' if workers > 1 else 's'} {what}"

    def update_record(self, record: JobRecord) -> None:
        """Apply a changed record of the job, including changed settings."""
        self.config = ServingJob.parse(record.spec)
        super().update_record(record)

    async def on_dead_message(self, stream: str, seq: int, draw: Draw | None, *, reason: str, attempts: int) -> None:
        """Copy a dead message to DEAD, where users can see it, and delete it. A training job would also end the
        message's draw (one prompt taken from the data set), but a deployment has no draws."""
        count = await self.publisher.copy_to_dead(stream, seq, reason=reason, attempts=attempts)
        await self.publisher.delete(range(seq, seq + count), stream=stream)

    def _report(self, phase: Phase, message: str) -> None:
        if phase == "running" and self._started_at is None:
            self._started_at = bus_datetime()
        generation = self.record.generation
        self._write_status(phase, message, observed_generation=generation, started_at=self._started_at)

    def status(self) -> dict[str, Any]:
        """Return zeros for the heartbeat: a deployment has no versions and no draws."""
        return {"version": 0, "running": 0}

    def why(self) -> list[dict[str, Any]]:
        """Return a row for each thing that the job waits for."""
        clock, now = time.monotonic(), bus_time()
        rows = blocked_waits(self.job, self.retry.blocked, now)
        rows += worker_waits(self.job, self.members, clock, now, services=("rollout",))
        if not self._served and not rows:
            since = self.record.created_at.timestamp()
            rows.append(wait_row("a rollout worker to load the model", subjects.JOBS, self.job, age_s=now - since))
        return rows
