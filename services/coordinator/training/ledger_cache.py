"""Reads and folds the ledger of any job, and keeps the folded ledgers of finished jobs in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord
from penstock.shared.runtime.ledger import LedgerArchive
from penstock.shared.transport.bus import Bus

__all__ = ["LedgerCache"]

KEPT_STATES = 8
"""Number of finished jobs whose folded ledgers stay in memory, because every part of a download reads one."""


class LedgerCache:
    """Returns folded ledgers of jobs. Folds the ledgers of finished jobs one at a time, and keeps the newest results.

    Args:
        record_of: returns the record of a job, or raises NotFound: ``JobStore.get``.
    """

    def __init__(self, bus: Bus, record_of: Callable[[str], Awaitable[JobRecord]], archive: LedgerArchive) -> None:
        self._bus, self._record_of, self._archive = bus, record_of, archive
        self._finished: OrderedDict[tuple[str, int], LedgerState] = OrderedDict()
        """Folded ledgers of finished jobs, by job id and number of extensions; least recently used first."""
        self._folding = asyncio.Lock()

    async def state(self, job: str) -> LedgerState:
        """Return the folded ledger of the job, read-only; cached for a finished job, whose snapshots are purged.

        Raises:
            NotFound: there is no such job.
            Unavailable: the bus does not answer.
        """
        record = await self._record_of(job)
        if record.status.phase not in TERMINAL_PHASES:
            return await Journal(self._bus, job, archive=self._archive).load()
        async with self._folding:
            key = job, record.extensions
            state = self._finished.pop(key, None) or await Journal(self._bus, job, archive=self._archive).load()
            if state.finished and state.extensions == record.extensions:
                self._finished[key] = state
            while len(self._finished) > KEPT_STATES:
                self._finished.popitem(last=False)
        return state

    def forget(self, job: str) -> None:
        """Drop the ledger of a deleted job."""
        for key in [key for key in self._finished if key[0] == job]:
            del self._finished[key]
