"""Publishes effects of decisions: tickets, batch manifests, deletions, purges, dead letters, commands to the trainer.

All effects are derived from the ledger and safe to repeat.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.run import Effects, JobRun
from penstock.services.coordinator.training.supply import Unreadable
from penstock.shared.errors import NotFound, ProtocolError, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import BatchRefused, Dropped, Event
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import DRAW_HEADER, Ack, BatchManifest, Command, CommandKind, Ticket
from penstock.shared.protocol.parts import PART, count_of, part_subject
from penstock.shared.transport.bus import MSG_ID, Bus, Message, Outgoing

__all__ = [
    "ATTEMPTS",
    "DEAD_HEADERS",
    "REASON",
    "SEQUENCE",
    "STREAM",
    "EffectPublisher",
    "Order",
    "TrainerCommands",
    "batch_id",
    "purge_manifests",
]

logger = logging.getLogger(__name__)
Order = Callable[[JobRun, Sequence[Draw]], Awaitable[None]]
"""Callback that gets groups for draws: it requests the groups, or publishes them itself. Safe to repeat."""
MAX_REASON = 500
ASK_AGAIN_S = 2.0
"""Interval at which a command to the trainer is repeated until the ledger shows its result (seconds)."""
TICKETS_AT_ONCE = 500
"""Number of tickets per atomic publish."""
STREAM, SEQUENCE = "Penstock-Stream", "Penstock-Sequence"
"""Headers of a dead letter: stream and stream sequence number of the message that it copies."""
ATTEMPTS, REASON = "Penstock-Attempts", "Penstock-Reason"
DEAD_HEADERS = frozenset({STREAM, SEQUENCE, ATTEMPTS, REASON})
"""Headers that only a dead letter has."""
_ID = re.compile(r"batch:[^:]+:(\d+)\.")


class EffectPublisher:
    """Publishes the effects of one job's decisions. ``retry`` repeats writes while the bus is away."""

    def __init__(self, bus: Bus, job: str, epoch: int, retry: Retry | None = None) -> None:
        self.bus, self.job, self.epoch = bus, job, epoch
        self.retry = retry or Retry(job)

    async def publish(self, run: JobRun, effects: Effects, order: Order | None = None) -> None:
        """Publish the effects of committed events. The callback ``order`` requests groups for new draws (prompts to
        sample). By default, this method publishes a ticket for each new draw."""
        for number in effects.announce:
            await self._announce(run, number)
        await self.delete(effects.delete)  # first: the replacement may need as much space
        if effects.tickets:
            await (order or self.publish_draws)(run, effects.tickets)
        if effects.purge_below is not None and not self.bus.held:  # otherwise the next checkpoint purges it
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

    async def publish_draws(self, run: JobRun, draws: Sequence[Draw]) -> None:
        """Publish a ticket for each draw."""
        for start in range(0, len(draws), TICKETS_AT_ONCE):
            await self.publish_tickets([self._ticket(run, draw) for draw in draws[start : start + TICKETS_AT_ONCE]])

    async def publish_again(self, run: JobRun, draws: Sequence[Draw], seq: int) -> None:
        """Publish new tickets for ``draws``, whose old tickets a leaving worker returned. Skip draws that no longer
        wait for a group.

        A new ticket has all its deliveries left, because a worker that leaves is no failure. ``seq``: stream sequence
        number of the old ticket in TICKETS; with it, a repeated call stores no second copy.
        """
        in_flight = set(run.state.in_flight) - run.candidates.keys()
        tickets = [msgspec.structs.replace(self._ticket(run, draw), begun=True) for draw in draws if draw in in_flight]
        if tickets:
            await self.publish_tickets(tickets, again=f".{seq}")

    def _ticket(self, run: JobRun, draw: Draw) -> Ticket:
        info = run.state.open[draw]
        return Ticket(
            draw=draw, min_version=info.min_version, deadline=info.deadline, epoch=self.epoch,
            temperature=info.temperature,
        )  # fmt: skip

    async def publish_tickets(self, tickets: list[Ticket], *, again: str = "") -> None:
        """Publish all ``tickets`` or none; wait while the bus is away.

        ``again``: suffix of the message ids, so that the bus stores tickets that it has stored before.
        """

        async def publish() -> None:
            await self.bus.publish_many([self._sent(ticket, again) for ticket in tickets], deadline_s=5)

        await self.retry.until_taken(f"{len(tickets)} tickets", subjects.tickets(self.job), publish)

    def _sent(self, ticket: Ticket, again: str) -> Outgoing:
        """Build the message of a ticket, with the seconds left until its draw's deadline."""
        timed = msgspec.structs.replace(ticket, deadline_s=max(0.0, ticket.deadline - bus_time()))
        data = pack(timed, job=self.job, id=str(ticket.draw), epoch=ticket.epoch)
        return Outgoing(subjects.tickets(self.job), data, headers_of(ticket), ticket_id(self.job, ticket) + again)

    async def delete(self, seqs: Iterable[int], *, stream: str = subjects.EXPERIENCE) -> None:
        """Delete messages that are no longer needed; a failed deletion does no harm."""
        for seq in seqs:
            try:
                await self.bus.delete_message(stream, seq)
            except (NotFound, Unavailable) as error:
                logger.debug("message %d of %s was not deleted: %s", seq, stream, error)

    async def copy_to_dead(self, stream: str, seq: int, *, reason: str, attempts: int) -> int:
        """Copy a payload to the stream DEAD, and return the number of messages of the payload. The original stays until
        the caller deletes it.

        If a wrong header names too many messages, those of other payloads are left out. Safe to repeat, also if the
        payload is gone. Waits while the bus is away. If DEAD is full, the copy is lost, an error is logged, and the job
        continues.
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

    async def copy_unreadable(self, messages: Sequence[Unreadable]) -> list[Unreadable]:
        """Copy messages to DEAD but do not delete them, because a coordinator of another version may be able to read
        them.

        Returns the messages that had no copy before: a later leader reads the same messages, but copies none again.
        Waits while the bus is away.
        """
        known = await self._dead_origins() if messages else set()
        new = [one for one in messages if (one.stream, str(one.seq)) not in known]
        for one in new:
            await self.copy_to_dead(one.stream, one.seq, reason=one.reason, attempts=1)
        return new

    async def _dead_origins(self) -> set[tuple[str, str]]:
        subject = subjects.dead(self.job)
        read = partial(self.bus.read, subjects.DEAD, subject, headers_only=True)
        dead_letters = await self.retry.until_taken("a look at the dead letters", subject, read)
        return {(one.headers.get(STREAM, ""), one.headers.get(SEQUENCE, "")) for one in dead_letters}

    async def copy_refused(self, run: JobRun, events: Sequence[Event]) -> None:
        """Copy to DEAD the groups that the trainer refused, before the decision that deletes them."""
        reason = next((event.reason for event in events if isinstance(event, BatchRefused)), "")
        again = [draw for event in events if isinstance(event, BatchRefused) for draw in event.bad]
        dropped = [event for event in events if isinstance(event, Dropped) and event.reason == "refused"]
        given_up = [draw for event in dropped for draw in event.draws]
        for draw in again + given_up:
            if (candidate := run.candidates.get(draw)) is not None:
                await self.copy_to_dead(subjects.EXPERIENCE, candidate.seq, reason=f"refused: {reason}", attempts=1)

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
    """Return the number of messages of a payload, from the header of its first message; 1 if the header is
    unreadable."""
    try:
        return count_of(message.headers)
    except ProtocolError:
        return 1


def headers_of(ticket: Ticket) -> dict[str, str]:
    """Return the headers of a ticket. The headers of a training ticket name its draw, so that a dead letter still names
    the draw."""
    return {DRAW_HEADER: str(ticket.draw)} if ticket.purpose == "train" else {}


def ticket_id(job: str, ticket: Ticket) -> str:
    """Return the message id of a ticket, by which the bus stores the ticket of a draw only once, whichever leader
    publishes it.

    Evaluation tickets also contain epoch, version and deadline: each evaluation requests a prompt again, because the
    results of an earlier one may be lost.
    """
    once = f".{ticket.epoch}.{ticket.version}.{ticket.deadline:.6f}" if ticket.version is not None else ""
    return f"ticket:{job}:{ticket.purpose}:{ticket.draw}{once}"


def batch_id(job: str, number: int, revision: int, epoch: int) -> str:
    """Return the message id of a manifest."""
    return f"batch:{job}:{number}.{revision}.{epoch}"


async def purge_manifests(bus: Bus, job: str, *, up_to: int) -> int:
    """Purge the manifests of a job up to batch ``up_to``; return the number of purged manifests.

    A running job no longer needs the manifests of batches that its newest checkpoint covers, because a restarted
    trainer repeats only later batches.
    """
    stop = 0
    for message in await bus.read(subjects.BATCHES, subjects.batches(job), headers_only=True):
        found = _ID.match(message.headers.get(MSG_ID, ""))
        if found is None or int(found[1]) > up_to:
            break
        stop = message.seq + 1
    return await bus.purge(subjects.BATCHES, subjects.batches(job), below_seq=stop)


class TrainerCommands:
    """Sends commands to the trainer of one job, one at a time: to checkpoint, roll back, or leave out draws."""

    def __init__(self, bus: Bus, outbox: Outbox, job: str, epoch: int) -> None:
        self._bus, self._outbox, self._job, self._epoch = bus, outbox, job, epoch
        self._asked_at = 0.0
        self._asked: tuple[object, ...] = ()

    def follow(self, run: JobRun, inputs: Inputs) -> bool:
        """Send the trainer the command that ``run`` needs now; return False if ``run`` needs none."""
        state, rollback = run.state, run.rollback(inputs)
        if rollback is not None:
            args = {"number": rollback.number, "reason": rollback.reason, "version": state.version}
            self._ask("rollback", args, (rollback.number, state.version))
        elif unwanted := run.unwanted:
            self._ask("leave_out", {"draws": [str(draw) for draw in unwanted]}, tuple(unwanted))
        elif reason := run.wants_checkpoint(inputs):
            newest = state.checkpoint
            self._ask("checkpoint", {"reason": reason}, (None if newest is None else newest.number, state.forked))
        else:
            return False
        return True

    def _ask(self, kind: CommandKind, args: dict[str, Any], about: tuple[object, ...]) -> None:
        asked = (kind, *about)
        if asked == self._asked and time.monotonic() - self._asked_at < ASK_AGAIN_S:
            return
        self._asked, self._asked_at = asked, time.monotonic()
        command = pack(Command(kind=kind, epoch=self._epoch, args=args), job=self._job, epoch=self._epoch)
        self._outbox.later(lambda: self._send(command), keep=False)

    async def _send(self, command: bytes) -> None:
        try:
            reply = await self._bus.request(subjects.command(self._job), command, deadline_s=ASK_AGAIN_S)
            ack, _ = unpack(reply, Ack)
            if not ack.ok:
                logger.warning("the trainer of %s refused a command: %s", self._job, ack.reason)
        except Unavailable as error:
            logger.info("the trainer of %s did not take the command yet: %s", self._job, error)
