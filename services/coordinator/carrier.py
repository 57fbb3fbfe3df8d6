"""Carries a job's committed decisions to the bus. All of it is derived from the ledger and safe to repeat."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import msgspec

from penstock.services.coordinator.batch_log import batch_id
from penstock.services.coordinator.retry import Retry
from penstock.services.coordinator.run import Effects, JobRun
from penstock.services.coordinator.supply import Unreadable
from penstock.shared.errors import NotFound, ProtocolError, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import BatchRefused, Dropped, Event
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import DRAW_HEADER, BatchManifest, Ticket
from penstock.shared.protocol.parts import PART, count_of, part_subject
from penstock.shared.transport.bus import MSG_ID, Bus, Message, Outgoing

__all__ = ["ATTEMPTS", "LETTER", "REASON", "SEQUENCE", "STREAM", "Carrier", "Order"]

logger = logging.getLogger(__name__)

Order = Callable[[JobRun, Sequence[Draw]], Awaitable[None]]
"""Has the groups of draws made; safe to repeat."""

MAX_REASON = 500
TICKETS_AT_ONCE = 500
"""Tickets of one durable write."""
STREAM, SEQUENCE = "Penstock-Stream", "Penstock-Sequence"
"""Where a dead letter was."""
ATTEMPTS, REASON = "Penstock-Attempts", "Penstock-Reason"
LETTER = frozenset({STREAM, SEQUENCE, ATTEMPTS, REASON})
"""Headers that a message has as a dead letter alone."""


class Carrier:
    """Tickets, batch manifests, deletions and purges of one job. ``retry``: says what they wait for."""

    def __init__(self, bus: Bus, job: str, epoch: int, retry: Retry | None = None) -> None:
        self.bus, self.job, self.epoch = bus, job, epoch
        self.retry = retry or Retry(job)

    async def carry_out(self, run: JobRun, effects: Effects, order: Order | None = None) -> None:
        """Do what follows from committed events; ``order`` has groups made, default: tickets ask for them."""
        for number in effects.announce:
            await self._announce(run, number)
        await self.delete(effects.delete)  # first: what replaces it may be as large
        if effects.tickets:
            await (order or self.ask)(run, effects.tickets)
        if effects.purge_below is not None and not self.bus.held:  # the next checkpoint gives it up
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
            hyperparameters=batch.hyperparameters,
        )
        data = pack(manifest, job=self.job, id=f"{number}.{batch.revision}", epoch=self.epoch)
        msg_id = batch_id(self.job, number, batch.revision, self.epoch)
        subject = subjects.batches(self.job)
        publish = partial(self.bus.publish, subject, data, msg_id=msg_id, deadline_s=5)
        await self.retry.until_taken(f"the manifest of batch {number}", subject, publish)

    async def ask(self, run: JobRun, draws: Sequence[Draw]) -> None:
        """Publish a ticket for each draw."""
        for start in range(0, len(draws), TICKETS_AT_ONCE):
            await self.publish_tickets([self._ticket(run, draw) for draw in draws[start : start + TICKETS_AT_ONCE]])

    def _ticket(self, run: JobRun, draw: Draw) -> Ticket:
        info = run.state.open[draw]
        return Ticket(
            draw=draw, min_version=info.min_version, deadline=info.deadline, epoch=self.epoch,
            temperature=info.temperature,
        )  # fmt: skip

    async def publish_tickets(self, tickets: list[Ticket]) -> None:
        """Publish tickets, all or none; waits while the bus is away."""

        async def publish() -> None:
            await self.bus.publish_many([self._sent(ticket) for ticket in tickets], deadline_s=5)

        await self.retry.until_taken(f"{len(tickets)} tickets", subjects.tickets(self.job), publish)

    def _sent(self, ticket: Ticket) -> Outgoing:
        """A ticket as it is published now, with the seconds that are left of its draw's deadline."""
        timed = msgspec.structs.replace(ticket, deadline_s=max(0.0, ticket.deadline - bus_time()))
        data = pack(timed, job=self.job, id=str(ticket.draw), epoch=ticket.epoch)
        return Outgoing(subjects.tickets(self.job), data, headers_of(ticket), ticket_id(self.job, ticket))

    async def delete(self, seqs: Iterable[int], *, stream: str = subjects.EXPERIENCE) -> None:
        """Delete messages that nobody needs; harmless if they stay."""
        for seq in seqs:
            try:
                await self.bus.delete_message(stream, seq)
            except (NotFound, Unavailable) as error:
                logger.debug("message %d of %s was not deleted: %s", seq, stream, error)

    async def keep_dead(self, stream: str, seq: int, *, reason: str, attempts: int) -> int:
        """Copy a payload to DEAD, before it is deleted; returns of how many messages it consists.

        Messages of others, which a wrong header lays claim to, do not count. Harmless when repeated, and where it is
        gone already. Waits while the bus is away. A full DEAD stops nobody: the payload is lost and the log says so.
        """
        place, count, parts = 0, 1, ""
        what, subject = f"a copy of message {seq} of {stream}", subjects.dead(self.job)
        while place < count:
            try:
                message = await self.retry.until_taken(what, subject, partial(self.bus.get, stream, seq + place))
            except NotFound:
                place += 1
                continue
            if not place:
                count, parts = _count(message), part_subject(message.subject)
            elif message.subject != parts or message.headers.get(PART) != str(place):
                return place
            await self.retry.until_taken(what, subject, partial(self._copy_dead, message, stream, reason, attempts))
            place += 1
        return count

    async def keep_unreadable(self, messages: Sequence[Unreadable]) -> list[Unreadable]:
        """Copy messages to DEAD and leave them where they are: a coordinator of another version may read them.

        Returns those that were not there yet: another leader reads them again. Waits while the bus is away.
        """
        known = await self._dead_origins() if messages else set()
        new = [one for one in messages if (one.stream, str(one.seq)) not in known]
        for one in new:
            await self.keep_dead(one.stream, one.seq, reason=one.reason, attempts=1)
        return new

    async def _dead_origins(self) -> set[tuple[str, str]]:
        subject = subjects.dead(self.job)
        read = partial(self.bus.read, subjects.DEAD, subject, headers_only=True)
        letters = await self.retry.until_taken("a look at the dead letters", subject, read)
        return {(one.headers.get(STREAM, ""), one.headers.get(SEQUENCE, "")) for one in letters}

    async def keep_refused(self, run: JobRun, events: Sequence[Event]) -> None:
        """Copy the groups that the trainer could not train to DEAD, before the decision that deletes them."""
        reason = next((event.reason for event in events if isinstance(event, BatchRefused)), "")
        again = [draw for event in events if isinstance(event, BatchRefused) for draw in event.bad]
        dropped = [event for event in events if isinstance(event, Dropped) and event.reason == "refused"]
        given_up = [draw for event in dropped for draw in event.draws]
        for draw in again + given_up:
            if (candidate := run.candidates.get(draw)) is not None:
                await self.keep_dead(subjects.EXPERIENCE, candidate.seq, reason=f"refused: {reason}", attempts=1)

    async def _copy_dead(self, message: Message, stream: str, reason: str, attempts: int) -> None:
        headers = {
            **{name: value for name, value in message.headers.items() if name != MSG_ID},
            STREAM: stream,
            SEQUENCE: str(message.seq),
            ATTEMPTS: str(attempts),
            REASON: " ".join(reason.split())[:MAX_REASON],
        }
        msg_id = f"dead:{stream}:{message.seq}"
        try:
            await self.bus.publish(subjects.dead(self.job), message.data, headers=headers, msg_id=msg_id, deadline_s=5)
        except StreamFull as error:
            logger.error("%s: message %d of %s is not kept (%s): %s", self.job, message.seq, stream, reason, error)


def _count(message: Message) -> int:
    """Messages of the payload that this one begins; an unreadable header stands for itself alone."""
    try:
        return count_of(message.headers)
    except ProtocolError:
        return 1


def headers_of(ticket: Ticket) -> dict[str, str]:
    """Headers of a ticket: a dead one still says which draw it asked for."""
    return {DRAW_HEADER: str(ticket.draw)} if ticket.purpose == "train" else {}


def ticket_id(job: str, ticket: Ticket) -> str:
    """Message id of a ticket: the same draw is published once, whoever leads.

    A prompt is evaluated again in each evaluation, and each has a deadline of its own: what an earlier one of the same
    leader and version earned may be lost.
    """
    once = f".{ticket.epoch}.{ticket.version}.{ticket.deadline:.6f}" if ticket.version is not None else ""
    return f"ticket:{job}:{ticket.purpose}:{ticket.draw}{once}"
