"""Checkpoints of one job: state is copied at a step boundary and written in the background while training continues."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.trainer.checkpoint.state import retain
from penstock.services.trainer.progress import Progress
from penstock.services.trainer.rank_group import RankGroup
from penstock.services.trainer.reports import Reporter
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.config.service import recorded_path
from penstock.shared.errors import CheckpointError
from penstock.shared.protocol.messages import Report

__all__ = ["Checkpointing", "pinned_in"]

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Pause before the next attempt after a checkpoint could not be written."""


class Checkpointing:
    """Takes checkpoints on request and writes them one at a time.

    Args:
        root: directory of all jobs' checkpoints, in the data directory.
        pinned: batch numbers whose checkpoints the coordinator wants to keep.
        wake: called when a checkpoint is due, because the session may be waiting for a batch.
    """

    def __init__(
        self, rank_group: RankGroup, reporter: Reporter, job: str, config: AnyTraining, *, root: Path, epoch: int,
        pinned: set[int], wake: Callable[[], None],
    ) -> None:  # fmt: skip
        self._rank_group, self._reporter = rank_group, reporter
        self._job, self._config, self._root, self._epoch = job, config, root, epoch
        self._pinned, self._wake = pinned, wake
        self._queue: asyncio.Queue[tuple[asyncio.Task[Path], Report]] = asyncio.Queue(maxsize=1)
        self._taken = -1
        self._busy = False
        self._reason: str | None = None
        self.writing = ""
        self.seconds = 0.0

    def ask(self, reason: str) -> None:
        """Request a checkpoint at the next step boundary. Ignored while a checkpoint is being written; callers must ask
        again."""
        if not self._busy:
            self._ask(reason)

    @property
    def asked(self) -> bool:
        """Return True if a checkpoint is due."""
        return self._reason is not None

    async def take(self, progress: Progress) -> None:
        """Copy the state and start to write it. Waits for the previous write, so that only one copy exists."""
        reason, self._reason = self._reason or "", None
        if progress.batch == self._taken:
            return  # requested again while it is being written
        began = time.perf_counter()
        await self.written()
        self._busy = True
        meta = {
            "version": progress.version, "epoch": self._epoch, "digest": progress.digest,
            "config": self._config.model_dump_json(),
        }  # fmt: skip
        report = Report(
            kind="checkpointed", epoch=self._epoch, batch=progress.batch, version=progress.version,
            digest=progress.digest, reason=reason,
        )  # fmt: skip
        write = await self._rank_group.save(progress.batch, dict(meta))
        self._taken = progress.batch
        self.seconds += time.perf_counter() - began
        await self._queue.put((write, report))

    async def secure(self, progress: Progress, reason: str, *, wanted: Callable[[], bool]) -> None:
        """Take a checkpoint and return once the ledger has it. Retries for as long as ``wanted()`` is true."""
        self._ask(reason)
        while self.asked and wanted():
            await self.take(progress)
            await self.written()

    async def run(self) -> None:
        """Report written checkpoints to the coordinator until cancelled. Raises Fenced."""
        while True:
            write, report = await self._queue.get()
            self.writing = f"checkpoint after batch {report.batch} to be written and recorded"
            try:
                path = await asyncio.shield(write)
            except CheckpointError as error:
                await self._try_again(report, error)
            else:
                await self._record(report, path)
            self.writing, self._busy = "", False
            self._queue.task_done()

    async def _record(self, report: Report, path: Path) -> None:
        await self._reporter.settled()
        data = await self._reporter.ask(msgspec.structs.replace(report, path=recorded_path(self._root.parent, path)))
        self._pinned = pinned_in(data) or self._pinned
        keep = int(data.get("keep", self._config.checkpoint.keep))
        try:
            await asyncio.to_thread(
                retain, self._root, self._job, recorded=report.batch, keep=keep, pinned=self._pinned
            )
        except OSError as error:  # tried again after the next one
            logger.warning("old checkpoints of job %s are not deleted: %s", self._job, error)

    async def _try_again(self, report: Report, error: CheckpointError) -> None:
        """Request the checkpoint again after a pause. Training continues meanwhile."""
        logger.error("%s", error)
        self.writing = f"a checkpoint to succeed: {error}"
        await asyncio.sleep(RETRY_S)
        self._taken = -1
        self._ask(report.reason)

    def _ask(self, reason: str) -> None:
        self._reason = reason
        self._wake()

    async def written(self) -> None:
        """Return once every checkpoint taken so far is recorded in the ledger."""
        await self._queue.join()


def pinned_in(data: dict[str, Any]) -> set[int]:
    """Return the batch numbers whose checkpoints the coordinator wants to keep, from one of its replies."""
    return set(data.get("pinned", ()))
