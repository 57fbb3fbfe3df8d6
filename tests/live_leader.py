"""Recorder of the decisions of a live supply, and of decisions that tests name, as the runner of a job records them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from penstock.services.coordinator.online.statuses import UnrecordedDecisions
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import Event, JobStarted, encode_events
from penstock.shared.protocol.live.interaction import FeedbackStatus, InteractionStatus
from penstock.shared.transport.bus import Bus

__all__ = ["Recorder", "decided_events", "record_decided"]


class Recorder:
    """Writer of the ledger of a job whose only decisions are those of its live supply."""

    def __init__(self, bus: Bus, supply: LiveSupply) -> None:
        self._journal, self._supply, self.state = Journal(bus, supply.job), supply, LedgerState()

    async def lead(self, *, read_from: tuple[int, int] | None = None) -> None:
        """Fold the ledger, append ``JobStarted`` if it is empty, and recover the supply, from ``read_from`` if set."""
        self.state = await self._journal.load()
        self.state.read_from = read_from or self.state.read_from
        if not self.state.started:
            await self._append([JobStarted(writer_epoch=1, time=0.0, config_digest="")])
        await self._supply.recover(self.state)

    async def record(self) -> None:
        """Append the decisions that follow from the received items to the ledger, and publish their statuses."""
        await self._supply.flush()
        for event in self._supply.decided(self.state, ends=False):
            seq = await self._append([event])
            await self._supply.committed(self.state, [event], seq)
        await self._supply.flush()

    async def _append(self, events: list[Event]) -> int:
        seq = await self._journal.append(events)
        fold(events, self.state)
        return seq


def decided_events(statuses: Iterable[FeedbackStatus], interactions: Iterable[InteractionStatus] = ()) -> list[Event]:
    """Build the events that record these final statuses."""
    unrecorded = UnrecordedDecisions()
    unrecorded.add(statuses)
    unrecorded.add_interactions(interactions)
    return [*unrecorded.drain(epoch=1, now=time.time(), read_to=(1, 1))]


async def record_decided(
    bus: Bus, job: str, *statuses: FeedbackStatus, interactions: Iterable[InteractionStatus] = ()
) -> None:
    """Append an entry with these final statuses to the ledger of a job that nobody leads."""
    await bus.publish(subjects.ledger(job), encode_events(decided_events(statuses, interactions)))
