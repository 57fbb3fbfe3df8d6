"""Copies a job's rows of METRICS to its trackers, off the critical path. A tracker that fails is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.trackers import Run, Tracker, open_tracker
from penstock.shared.config.tracking import TrackerConfig
from penstock.shared.protocol import subjects
from penstock.shared.runtime.tasks import unexpected
from penstock.shared.transport.bus import Bus

__all__ = ["Tracking"]

logger = logging.getLogger(__name__)

FINISH_S = 60.0
"""Longest time that trackers have at the end of a run to write their remaining rows (seconds)."""


class Tracking:
    """The trackers of one job; ``follow`` runs until cancelled, ``finish`` waits until every row is written."""

    def __init__(self, bus: Bus, outbox: Outbox, configs: Sequence[TrackerConfig], run: Run) -> None:
        self._bus, self._outbox, self._run = bus, outbox, run
        self._sinks = [_Sink(outbox, config, run) for config in configs]
        self._last_seq = 0
        self._moved = asyncio.Event()

    async def follow(self) -> None:
        """Write all rows, from the first one on, to each tracker. Each tracker has its own thread.

        On cancellation, return at once; the threads still write the rows that they have.
        """
        if not self._sinks:
            return
        try:
            await asyncio.gather(*(sink.open() for sink in self._sinks))
            reader = self._bus.follow(subjects.METRICS, subjects.metrics(self._run.id))
            async with contextlib.aclosing(reader) as messages:
                async for message in messages:
                    row = msgspec.json.decode(message.data)  # non-finite values are null
                    await asyncio.gather(*(sink.write(row) for sink in self._sinks))
                    self._last_seq = message.seq
                    self._moved.set()
        finally:
            for sink in self._sinks:
                sink.abandon()

    async def finish(self) -> None:
        """Write the remaining rows and close the trackers at the end of the run; gives up after FINISH_S.

        Then flush the outbox, so that events about failed trackers are sent.
        """
        if not self._sinks:
            return
        newest = await self._bus.last(subjects.METRICS, subjects.metrics(self._run.id))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                while newest is not None and self._last_seq < newest.seq:
                    self._moved.clear()
                    await self._moved.wait()
                await asyncio.gather(*(sink.close() for sink in self._sinks))
        await self._outbox.flush()


class _Sink:
    """One tracker and its thread. A tracker that fails gets no more rows."""

    def __init__(self, outbox: Outbox, config: TrackerConfig, run: Run) -> None:
        self._outbox, self._config, self._run = outbox, config, run
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"track-{config.type}")
        self._tracker: Tracker | None = None

    async def open(self) -> None:
        await self._guarded(self._open())

    async def write(self, row: dict[str, Any]) -> None:
        tracker = self._tracker
        if tracker is not None:
            values = {name: value for name, value in row["values"].items() if value is not None}
            await self._guarded(self._do(partial(tracker.write, int(row["step"]), float(row["time"]), values)))

    async def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            await self._guarded(self._do(tracker.close))

    def abandon(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._thread.submit(tracker.close)
        self._thread.shutdown(wait=False)

    async def _open(self) -> None:
        opening = partial(open_tracker, self._config, self._run)
        self._tracker = await asyncio.get_running_loop().run_in_executor(self._thread, opening)

    async def _do(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``; drop the tracker on any exception, because third-party code must not end the job."""
        error = await unexpected(work)
        if error is not None:
            name = self._config.type
            logger.warning("tracker %s is left out", name, exc_info=error)
            self._outbox.event("warning", "tracking", f"{name} is left out from here on: {error!r}")
            self._tracker = None
