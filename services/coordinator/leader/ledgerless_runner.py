"""Base of the runners of jobs without a ledger: evaluations and deployments. Such jobs have no decisions that a new
leader must recover."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.effects import EffectPublisher
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.training.retry import Retry
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.jobs import JobFailure, JobRecord, Phase
from penstock.shared.protocol.messages import Ack, Report
from penstock.shared.transport.bus import Bus

__all__ = ["LedgerlessRunner"]


class LedgerlessRunner:
    """Base class: leader of one job without a ledger. Has the job's record, the outbox, and the failure that a rollout
    worker reports."""

    def __init__(self, bus: Bus, store: JobStore, members: Members, record: JobRecord, *, epoch: int) -> None:
        self.bus, self.members = bus, members
        self.job, self.record, self.epoch = record.id, record, epoch
        self.outbox = Outbox(bus, store, self.job, attempt=record.status.attempt + 1)
        self.retry = Retry(self.job, report=lambda text: self.outbox.event("warning", "blocked", text))
        self.publisher = EffectPublisher(bus, self.job, epoch, self.retry)
        self._failure: JobFailure | None = None
        self._changed, self._ended = asyncio.Event(), asyncio.Event()

    def update_record(self, record: JobRecord) -> None:
        """Apply a changed record of the job."""
        self.record = record
        self.wake()

    def wake(self) -> None:
        """Check the job now."""
        self._changed.set()

    @contextlib.asynccontextmanager
    async def _running(self, *others: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Run the outbox, the report server and ``others`` while the ``async with`` block runs; then flush the outbox
        and stop all of them."""
        async with asyncio.TaskGroup() as tasks:
            parts = (self.outbox.run(), self._serve_reports(), *others)
            running = [tasks.create_task(part) for part in parts]
            yield
            await self.outbox.flush()
            self._ended.set()
            for task in running:
                task.cancel()

    async def _until_changed(self, seconds: float) -> None:
        """Wait for a change, at most ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _serve_reports(self) -> None:
        """Serve failure reports of workers; acknowledge each only after the job's record contains the failure."""

        async def on_report(data: bytes) -> bytes:
            report, _ = unpack(data, Report)
            if report.kind == "failed":
                error = JobFailure(code="rollout_failed", message=report.reason, service="rollout")
                self._failure = self._failure or error
                self._changed.set()
                await self._ended.wait()  # the worker has a deadline, and repeats the report
            return pack(Ack(ok=True), job=self.job, epoch=self.epoch)

        server = await self.bus.serve(subjects.report(self.job), on_report)
        try:
            await asyncio.Event().wait()
        finally:
            await server.close(0.5)

    def _write_status(self, phase: Phase, message: str, **more: Any) -> None:
        """Write the job's status; ``more``: fields that only one kind of job has."""
        over = phase not in ("pending", "running")
        fields = {
            "phase": phase,
            "message": message,
            "error": self._failure if phase == "failed" else None,
            "finished_at": bus_datetime() if over else None,
            **more,
        }
        self.outbox.status(fields, force=over)
