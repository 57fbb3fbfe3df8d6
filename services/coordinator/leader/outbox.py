"""Writes a job's metric rows, events, status record and policy clock (its newest policy version) in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from penstock.services.coordinator.jobs.gauges import JobGauges
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.training.ledger import NO_SIGNAL
from penstock.shared.errors import Conflict, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime, bus_time
from penstock.shared.protocol.events import (
    BatchTrained,
    BestCheckpoint,
    CanaryBegun,
    Checkpointed,
    Dropped,
    Event,
    Extended,
    LineageForked,
    Promoted,
    PromotionRefused,
    Quarantined,
    SettingsChanged,
)
from penstock.shared.protocol.jobs import JobFailure
from penstock.shared.transport.bus import Bus

__all__ = ["Outbox", "announce"]

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5
HEARTBEAT_S = 10.0
"""Interval at which an unchanged status is rewritten (seconds), as a heartbeat of the job's leader."""
RETRY_S = 0.5


class Outbox:
    """Sends queued rows in order, and only the newest value of the status and of the clock. Retries while the bus is
    unreachable.

    Decisions never wait for the outbox. Rows that a full stream refuses are dropped and logged. ``attempt``: see
    ``JobStatus``.
    """

    def __init__(self, bus: Bus, store: JobStore, job: str, *, attempt: int = 1) -> None:
        self._bus, self._store, self._job, self._attempt = bus, store, job, attempt
        self._gauges = JobGauges(job)
        self._queue: asyncio.Queue[tuple[Callable[[], Awaitable[None]], bool]] = asyncio.Queue(maxsize=10_000)
        self._status: dict[str, Any] = {}
        self._sent_status: dict[str, Any] = {}
        self._clock: bytes | None = None
        self._last_status = self._written = 0.0
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()

    def metrics(
        self,
        kind: str,
        step: int,
        version: int,
        values: dict[str, float],
        *,
        batch: int,
        entry: int = 0,
        time: float | None = None,
    ) -> None:
        """Queue one row of METRICS about the weights that ``batch`` made; ``step`` is the step number that users see.

        ``entry``: stream sequence number of the ledger entry that contains the update; ``time``: time of measurement,
        None: now.
        """
        self._gauges.show(kind, values)
        row = {
            "kind": kind, "step": step, "batch": batch, "version": version, "entry": entry,
            "time": bus_time() if time is None else time, "values": values,
        }  # fmt: skip
        self._publish(subjects.metrics(self._job), row, f"metrics:{self._job}:{kind}:{step}:{version}")

    def event(self, level: str, type: str, message: str, **data: Any) -> None:
        """Queue one row of EVENTS."""
        row = {"time": bus_time(), "level": level, "type": type, "message": message, "data": data}
        self._publish(subjects.events(self._job), row, None)

    def _publish(self, subject: str, row: dict[str, Any], msg_id: str | None) -> None:
        data = msgspec.json.encode(row)
        self.later(lambda: self._send(subject, data, msg_id))

    async def _send(self, subject: str, data: bytes, msg_id: str | None) -> None:
        try:
            await self._bus.publish(subject, data, msg_id=msg_id, deadline_s=5)
        except StreamFull as error:  # status and clock wait behind it and matter more
            logger.error("%s: a row of %s is lost: %s", self._job, subject, error)

    def later(self, work: Callable[[], Awaitable[None]], *, keep: bool = True) -> None:
        """Queue ``work`` for the bus. With ``keep``, retry the work until the bus accepts it."""
        self._queue.put_nowait((work, keep))
        self._changed.set()

    def clock(self, version: int, digest: str, epoch: int) -> None:
        """Queue the job's policy clock: the newest version, the digest of its weights, and the leader's epoch."""
        self._clock = msgspec.json.encode({"version": version, "digest": digest, "epoch": epoch, "time": bus_time()})
        self._changed.set()

    def status(self, fields: dict[str, Any], *, force: bool = False) -> None:
        """Queue the status. ``run`` sends a new phase at once, and other changes within STATUS_EVERY_S.

        ``run`` sends an unchanged status again every HEARTBEAT_S. ``force``: send the status at once in any case.
        """
        phase, before = fields["phase"], self._status.get("phase")
        if phase != before:
            self.event("error" if phase == "failed" else "info", "phase", f"{phase}: {fields['message']}".rstrip(": "))
        is_new, self._status = fields != self._status, fields
        if force or phase != before:
            self._last_status = 0.0
        if is_new or not self._status_rest_s():
            self._changed.set()

    async def fail(self, error: JobFailure) -> None:
        """Write the status of a job that failed before it began to run."""
        fields = {"phase": "failed", "message": error.message, "error": error, "finished_at": bus_datetime()}
        self.status(fields, force=True)
        await self.flush()

    async def run(self) -> None:
        """Send until cancelled, and export the job's Prometheus gauges meanwhile."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S if self._clock is not None else self._status_rest_s()):
                        await self._changed.wait()
                self._changed.clear()
                await self._drain()
        finally:
            self._gauges.hide()

    async def flush(self) -> None:
        """Send all queued rows, the clock and the status now."""
        async with self._sending:
            self._last_status = 0.0
            await self._send_all()
            while self._status != self._sent_status:  # a job's last status would not be retried
                self._last_status = 0.0
                await self._send_all()

    async def _drain(self) -> None:
        async with self._sending:
            await self._send_all()

    async def _send_all(self) -> None:
        while not self._queue.empty():
            work, keep = self._queue.get_nowait()
            while not await self._try(work) and keep:
                pass
        if self._clock is not None:
            clock, self._clock = self._clock, None
            if not await self._try(lambda: self._put_clock(clock)):
                self._clock = self._clock or clock
        if self._status and not self._status_rest_s():
            self._last_status, fields = time.monotonic(), dict(self._status)
            await self._try(lambda: self._put_status(fields))

    def _status_rest_s(self) -> float:
        """Return the seconds until the status must be written. A changed status is due sooner than an unchanged one."""
        if not self._status:
            return HEARTBEAT_S
        due = self._last_status + STATUS_EVERY_S
        if self._status == self._sent_status:
            due = max(due, self._written + HEARTBEAT_S)
        return max(0.0, due - time.monotonic())

    async def _put_clock(self, clock: bytes) -> None:
        await self._bus.kv(subjects.POLICY).put(self._job, clock)

    async def _put_status(self, fields: dict[str, Any]) -> None:
        await self._store.set_status(self._job, **fields, attempt=self._attempt)
        self._sent_status, self._written = fields, time.monotonic()

    async def _try(self, work: Callable[[], Awaitable[None]]) -> bool:
        try:
            await work()
        except (Unavailable, Conflict) as error:
            logger.warning("%s: not told yet: %s", self._job, error)
            await asyncio.sleep(RETRY_S)
            return False
        return True


def announce(outbox: Outbox, events: Iterable[Event]) -> None:
    """Publish events for the decisions that matter to users."""
    for event in events:
        match event:
            case Checkpointed():
                why = f" ({event.reason})" if event.reason else ""
                text = f"checkpoint after update {event.number}{why} at {event.path}"
                outbox.event("info", "checkpoint", text, number=event.number, reason=event.reason)
            case BestCheckpoint():
                text = f"checkpoint {event.number} is the best: {event.metric} {event.value:.4g} after {event.step}"
                outbox.event("info", "best", text, number=event.number, value=event.value)
            case Dropped() if event.reason not in ("run_ended", "cancelled", NO_SIGNAL):
                ending = "" if event.redraw else " for good"
                outbox.event("warning", "dropped", f"{len(event.draws)} draws dropped{ending}: {event.reason}")
            case LineageForked():
                outbox.event("warning", "lineage_forked", f"rolled back from batch {event.from_batch}: {event.reason}")
            case Promoted() | PromotionRefused() | CanaryBegun() | Quarantined():
                _announce_safety(outbox, event)
            case SettingsChanged():
                shown = ", ".join(
                    f"{key} {value}" for key, value in sorted(event.settings.items()) if value is not None
                )
                text = f"from update {event.update_index + 1} on: {shown}"
                outbox.event("info", "settings", text, step=event.update_index + 1, settings=event.settings)
            case Extended():
                text = f"the job goes on, until {event.max_updates} updates are done"
                outbox.event("info", "extended", text, max_updates=event.max_updates)
            case BatchTrained() if event.number == 1:
                outbox.event("info", "step", "first policy update done")
            case _:
                pass


def _announce_safety(outbox: Outbox, event: Promoted | PromotionRefused | CanaryBegun | Quarantined) -> None:
    match event:
        case CanaryBegun():
            text = f"version {event.version} answers {event.share:.0%} of the conversations, {event.served} the others"
            outbox.event("info", "canary", text, version=event.version, share=event.share, figures=event.figures)
        case Promoted():
            text = f"version {event.version} is served ({event.reason})"
            outbox.event("info", "promoted", text, version=event.version, figures=event.figures)
        case PromotionRefused():
            text = f"version {event.version} is not served: {event.reason}"
            outbox.event("warning", "promotion_refused", text, version=event.version, figures=event.figures)
        case Quarantined():
            text = f"{len(event.items)} items of feedback are held back: see the quarantine"
            outbox.event("warning", "quarantined", text, feedback=sorted(event.items))
