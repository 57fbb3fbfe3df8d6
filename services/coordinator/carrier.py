"""Carries a job's committed decisions to the bus. All of it is derived from the ledger and safe to repeat."""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.services.coordinator.run import Effects, JobRun
from penstock.shared.errors import NotFound, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import BatchManifest, Ticket
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["Carrier"]

logger = logging.getLogger(__name__)

RETRY_S = 0.2


class Carrier:
    """Tickets, batch manifests, deletions and purges of one job. ``sealed_at``: when a batch was announced last."""

    def __init__(self, bus: Bus, job: str, epoch: int) -> None:
        self.bus, self.job, self.epoch = bus, job, epoch
        self.sealed_at = time.time()

    async def carry_out(self, run: JobRun, effects: Effects) -> None:
        """Do what follows from committed events."""
        for number in effects.announce:
            await self._announce(run, number)
            self.sealed_at = time.time()
        if effects.tickets:
            await self.publish_tickets([self._ticket(run, draw) for draw in effects.tickets])
        for seq in effects.delete:
            await self.delete(seq)
        if effects.purge_below is not None:
            await self.bus.purge(subjects.EXPERIENCE, subjects.experience(self.job), below_seq=effects.purge_below)

    async def _announce(self, run: JobRun, number: int) -> None:
        batch = run.state.sealed.get(number)
        if batch is None:
            return
        manifest = BatchManifest(
            number=number,
            revision=batch.revision,
            start_version=batch.start_version,
            update_index=batch.update_index,
            groups=batch.groups,
        )
        data = pack(manifest, job=self.job, id=f"{number}.{batch.revision}", epoch=self.epoch)
        await self._publish(
            subjects.batches(self.job), data, msg_id=f"batch:{self.job}:{number}.{batch.revision}.{self.epoch}"
        )

    def _ticket(self, run: JobRun, draw: Draw) -> Ticket:
        info = run.state.open[draw]
        return Ticket(draw=draw, min_version=info.min_version, deadline=info.deadline, epoch=self.epoch)

    async def publish_tickets(self, tickets: list[Ticket]) -> None:
        """Publish tickets, all or none; waits while the bus is away."""
        subject = subjects.tickets(self.job)
        outgoing = [
            Outgoing(subject, pack(t, job=self.job, id=str(t.draw), epoch=t.epoch), {}, ticket_id(self.job, t))
            for t in tickets
        ]
        while True:
            try:
                await self.bus.publish_many(outgoing, deadline_s=5)
                return
            except Unavailable as error:
                logger.warning("tickets of %s wait: %s", self.job, error)
                await asyncio.sleep(RETRY_S)

    async def _publish(self, subject: str, data: bytes, *, msg_id: str | None = None) -> None:
        while True:
            try:
                await self.bus.publish(subject, data, msg_id=msg_id, deadline_s=5)
                return
            except Unavailable as error:
                logger.warning("publish on %s waits: %s", subject, error)
                await asyncio.sleep(RETRY_S)

    async def delete(self, seq: int) -> None:
        """Delete a group that nobody needs; harmless if it stays."""
        try:
            await self.bus.delete_message(subjects.EXPERIENCE, seq)
        except (NotFound, Unavailable) as error:
            logger.debug("group %d was not deleted: %s", seq, error)


def ticket_id(job: str, ticket: Ticket) -> str:
    """Message id of a ticket: the same draw is published once, whoever leads."""
    epoch = f".{ticket.epoch}.{ticket.version}" if ticket.version is not None else ""
    return f"ticket:{job}:{ticket.purpose}:{ticket.draw}{epoch}"
