"""Reports of the trainer to the coordinator: in order, repeated until they are in the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.services.trainer.fence import Fence
from penstock.shared.errors import Fenced, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Ack, Report
from penstock.shared.transport.bus import Bus

__all__ = ["Reporter"]

logger = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 5.0
RETRY_S = 0.2

Recorded = Callable[[], Awaitable[None]]
"""Callback that runs once a report is in the ledger."""


class Reporter:
    """Sends reports. A refusal means that the ledger disagrees and this trainer must start over (Fenced).

    ``fence``: refuses replies from coordinators with an old epoch, which are then ignored.
    """

    def __init__(self, bus: Bus, job: str, fence: Fence | None = None) -> None:
        self._bus, self._job = bus, job
        self._fence = fence or Fence()
        self._queue: asyncio.Queue[tuple[Report, Recorded | None]] = asyncio.Queue(maxsize=256)
        self.unanswered: tuple[str, float] | None = None
        """(description of a report that the coordinator has not answered, Unix time of the first attempt); or None."""

    async def ask(self, report: Report) -> dict[str, Any]:
        """Send one report, wait without limit for its reply, and return the reply's data.

        ``unanswered`` is set while the coordinator does not answer.

        Raises:
            Fenced: the coordinator refused the report.
        """
        data = pack(report, job=self._job, id=f"{report.kind}:{report.batch}", epoch=report.epoch)
        began = bus_time()
        while True:
            try:
                reply = await self._bus.request(subjects.report(self._job), data, deadline_s=ANSWER_DEADLINE_S)
            except Unavailable as error:
                self.unanswered = f"the coordinator to record '{report.kind}' of batch {report.batch}", began
                logger.info("report %s %d waits: %s", report.kind, report.batch, error)
                await asyncio.sleep(RETRY_S)
                continue
            ack, envelope = unpack(reply, Ack)
            if not self._fence.lets_in(envelope.epoch):  # its state may be old; ask the current leader
                logger.warning("report %s %d was answered by a fenced coordinator", report.kind, report.batch)
                await asyncio.sleep(RETRY_S)
                continue
            self.unanswered = None
            if not ack.ok:
                raise Fenced(f"report '{report.kind}' of batch {report.batch} refused: {ack.reason}")
            return ack.data

    async def post(self, report: Report, then: Recorded | None = None) -> None:
        """Queue a report. ``then`` is awaited once the report is in the ledger, before the next report is sent."""
        await self._queue.put((report, then))

    async def run(self) -> None:
        """Send queued reports until cancelled. Raises Fenced."""
        while True:
            report, then = await self._queue.get()
            await self.ask(report)
            if then is not None:
                await then()
            self._queue.task_done()

    async def settled(self) -> None:
        """Return once every queued report is in the ledger and its callback is done."""
        await self._queue.join()
