"""Tickets of one job, for any kind of policy: leases, deadlines, duplicates and evaluation results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from penstock.services.rollout.conversations.asking import Asking
from penstock.services.rollout.publisher import GroupPublisher
from penstock.shared.errors import ConfigError, DataError, DeadlineError, PenstockError, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Ack, EvalResult, Report, Ticket
from penstock.shared.transport.bus import Bus, Delivery, Puller

__all__ = ["HandedOver", "LeftBehind", "TicketTaker", "Versions"]

logger = logging.getLogger(__name__)

ACK_WAIT_S = 5.0
"""Lease in seconds: a ticket without a lease extension for this long goes to another worker."""
MAX_DELIVER = 5
FETCH_WAIT_S = 1.0
HAND_OVER_S = 2.0
"""Time limit of the coordinator's answer to a worker that gives a ticket back."""
UNREADABLE_PAUSE_S = 0.5
LATE_PAUSE_S = 5.0
"""Pause before a ticket that missed its deadline is redelivered, unless the coordinator drops its draw."""


class LeftBehind(Exception):  # noqa: N818  no error: the coordinator has its answer, or continued without it
    """Raised if the policy has moved past the version that a ticket requires; versions only rise."""


class HandedOver(Exception):  # noqa: N818  no error: another worker goes on
    """Raised if a draining worker gives a ticket back before it is answered."""


class Versions(Protocol):
    """Sequence of policy versions that a worker serves."""

    @property
    def version(self) -> int:
        """Version that is served now."""

    async def reach(self, wanted: Callable[[int], bool], *, deadline_s: float, what: str) -> None:
        """Wait until ``wanted(version)`` is true. Raises a DeadlineError that names ``what``."""


class TicketTaker:
    """Answers each ticket once within its deadline, and extends its lease meanwhile.

    Args:
        answer: answers a ticket; the key identifies it among the work in progress. Raises ConfigError, DataError or
            ProtocolError if it cannot be answered, DeadlineError if it is too late, LeftBehind if it is obsolete,
            HandedOver if another worker shall answer it.
        give_up: reports to the coordinator that a ticket cannot be answered, and why.
        room: returns how many more tickets to take now, besides those taken but not begun (``num_unbegun``).
        progress: returns a counter that grows while work proceeds; None while nothing runs.
    """

    def __init__(
        self,
        bus: Bus,
        job: str,
        asking: Asking,
        *,
        answer: Callable[[Ticket, str], Awaitable[None]],
        give_up: Callable[[Ticket, str, str], Awaitable[None]],
        room: Callable[[], int],
        progress: Callable[[], int | None],
    ) -> None:
        self._bus, self._job, self._asking = bus, job, asking
        self._answer, self._give_up, self._room, self._progress = answer, give_up, room, progress
        self._holds: dict[str, tuple[int, int | None]] = {}
        """Key of the work in progress -> (stream sequence number of its ticket, policy version that the ticket
        requires)."""
        self._repeated: set[str] = set()
        """Keys of work in progress whose ticket was delivered before, or given back by another worker."""
        self._ends: dict[str, float] = {}
        """Key of the work in progress -> deadline of its ticket (monotonic clock, seconds)."""
        self._changed = asyncio.Event()
        self._draining = False
        self._idle: set[asyncio.Timeout] = set()
        """Timeouts of the waits that ``drain`` ends: waits for tickets and for policy versions."""
        self.num_taken = 0
        """Number of tickets taken and not finished."""
        self.num_unbegun = 0
        """Number of taken tickets not yet begun."""

    @property
    def busy(self) -> bool:
        """Return True if tickets are in progress."""
        return bool(self._holds)

    def is_repeated(self, key: str) -> bool:
        """Return True if another worker may have begun the ticket ``key`` before, so that saved completions of it may
        exist. ``key`` must name a ticket in progress on this worker."""
        return key in self._repeated

    def drain(self) -> None:
        """Take no more tickets, and give back those that wait for a policy version. ``run`` ends once all other tickets
        are done."""
        self._draining = True
        self._changed.set()
        now = asyncio.get_running_loop().time()
        while self._idle:
            self._idle.pop().reschedule(now)

    def look_again(self) -> None:
        """Signal that there may be room for more tickets."""
        self._changed.set()

    def status(self, publisher: GroupPublisher) -> dict[str, Any]:
        """Return the work in progress and the oldest wait, for a heartbeat."""
        row: dict[str, Any] = {"holds": [key.split(":", 1)[1] for key in list(self._holds)]}
        if publisher.blocked is not None:
            since, why = publisher.blocked
            row |= {"waiting_for": why, "since": since, "subject": subjects.experience(self._job)}
        elif self._asking.oldest is not None:
            since, what, subject = self._asking.oldest
            row |= {"waiting_for": what, "since": since, "subject": subject}
        return row

    async def run(self) -> None:
        """Take tickets until drained; return when the last one is done."""
        puller = await self._bus.pull(
            subjects.TICKETS, subjects.tickets(self._job), f"rollout-{self._job}",
            ack_wait_s=ACK_WAIT_S, max_deliver=MAX_DELIVER, max_ack_pending=4096,
        )  # fmt: skip
        async with asyncio.TaskGroup() as working:
            try:
                while (room := await self._wait_for_room()) > 0:
                    for delivery in await self._fetch(puller, room):
                        self.num_taken += 1
                        self.num_unbegun += 1
                        working.create_task(self._work(delivery)).add_done_callback(self._done_with)
            finally:
                await puller.close()

    async def _fetch(self, puller: Puller, room: int) -> list[Delivery]:
        """Fetch up to ``room`` tickets; ``drain`` ends the wait for them."""
        try:
            async with self._until_drained():
                return await puller.fetch(room, FETCH_WAIT_S)
        except TimeoutError:
            return []

    @asynccontextmanager
    async def _until_drained(self) -> AsyncIterator[None]:
        """Enclose a wait. Once ``drain`` is called, the wait raises TimeoutError."""
        async with asyncio.timeout(0.0 if self._draining else None) as wait:
            self._idle.add(wait)
            try:
                yield
            finally:
                self._idle.discard(wait)

    async def _wait_for_room(self) -> int:
        """Wait for room; return the number of tickets to fetch, 0 once drained."""
        while not self._draining:
            self._changed.clear()
            if (room := self._room()) > 0:
                return room
            await self._changed.wait()
        return 0

    def _done_with(self, _: asyncio.Task[None]) -> None:
        self.num_taken -= 1
        self._changed.set()

    async def reach(self, policy: Versions, ticket: Ticket, key: str, *, oldest: int) -> None:
        """Wait until ``policy`` has version ``oldest`` or a later one, within the ticket's deadline.

        Raises:
            DeadlineError: the version does not come in time.
            HandedOver: this worker leaves before the version comes.
            LeftBehind: the version that the ticket requires has been replaced.
        """
        if policy.version < oldest:
            self._asking.wait(key, f"policy version {oldest} (serving {policy.version})", subjects.MANIFESTS)
            left_s, what = self._ends[key] - time.monotonic(), f"version {oldest}"
            try:
                async with self._until_drained():
                    await policy.reach(lambda version: version >= oldest, deadline_s=left_s, what=what)
            except DeadlineError:
                raise
            except TimeoutError:
                raise HandedOver(f"this worker leaves before it serves {what}") from None
            self._asking.done(key)
        if ticket.version is not None and policy.version > ticket.version:  # versions rise: it will not come again
            raise LeftBehind(f"version {ticket.version} was left behind for {policy.version}")

    async def report(
        self,
        ticket: Ticket,
        key: str,
        rewards: list[float],
        *,
        failed: list[bool],
        greedy: list[bool],
        parts: dict[str, list[float]] | None = None,
    ) -> None:
        """Send the result of an evaluation ticket to the coordinator."""
        result = EvalResult(
            version=ticket.version or 0, ordinal=ticket.draw.ordinal, rewards=rewards, failed=failed, greedy=greedy,
            parts=parts or {},
        )  # fmt: skip
        data = pack(result, job=self._job, id=key, epoch=ticket.epoch)
        what = "the coordinator to take an evaluation result"
        await self._asking.ask(subjects.evaluation(self._job), data, key, what)

    # -- one ticket --------------------------------------------------------------------------------------------------

    async def _work(self, delivery: Delivery) -> None:
        self.num_unbegun -= 1
        try:
            ticket, _ = unpack(delivery.data, Ticket)
        except ProtocolError as error:  # rejected (nak): after its last delivery it becomes a dead letter
            logger.error("ticket %d is unreadable: %s", delivery.seq, error)
            await delivery.nak(UNREADABLE_PAUSE_S)
            return
        key = f"{ticket.purpose}:{ticket.draw}"
        if key in self._holds:
            seq, version = self._holds[key]
            if delivery.seq != seq and ticket.version == version:  # a new leader repeated a ticket in progress
                await (delivery.nak() if self._draining else delivery.ack())  # who leaves may give that one back
            return  # redelivered while in progress (a stalled process): the first delivery's ack counts
        self._holds[key] = delivery.seq, ticket.version
        left_s = ticket.left_s(delivery.time)
        pause_s: float | None = None
        self._ends[key] = time.monotonic() + left_s
        if delivery.deliveries > 1 or ticket.begun:
            self._repeated.add(key)
        keeper = asyncio.create_task(self._keep(delivery, self._ends[key]))
        try:
            async with asyncio.timeout(left_s):
                await self._attempt(ticket, key)
        except LeftBehind as error:
            logger.info("ticket %s is over: %s", key, error)
        except (TimeoutError, DeadlineError) as error:
            logger.info("ticket %s is given back: %s", key, str(error) or "past its deadline")
            pause_s = LATE_PAUSE_S
        except HandedOver as error:
            logger.info("ticket %s is given back: %s", key, error)
            pause_s = None if await self._publishes_again(ticket, delivery.seq) else 0.0
        finally:
            keeper.cancel()
            self._ends.pop(key, None)
            self._holds.pop(key, None)
            self._repeated.discard(key)
            self._asking.done(key)
        if pause_s is None:
            await delivery.ack()
        else:
            await delivery.nak(pause_s)  # only the coordinator drops a draw

    async def _attempt(self, ticket: Ticket, key: str) -> None:
        """Answer a ticket. A ticket that cannot be answered is reported; other tickets and the session continue.

        Raises:
            HandedOver: this worker leaves.
        """
        if self._draining:
            raise HandedOver("this worker leaves")
        try:
            await self._answer(ticket, key)
        except (ConfigError, DataError, ProtocolError) as error:
            logger.error("ticket %s cannot be answered: %s", key, error)
            await self._give_up(ticket, key, str(error))

    async def _publishes_again(self, ticket: Ticket, seq: int) -> bool:
        """Ask the coordinator to publish a training ticket again. The alternative, a redelivery by NATS, would count
        towards MAX_DELIVER, the maximum number of deliveries.

        Returns:
            True if the coordinator publishes the ticket again; False if the ticket must be redelivered.
        """
        if ticket.purpose != "train":
            return False
        report = Report(kind="handed_over", epoch=ticket.epoch, bad=[ticket.draw], seq=seq)
        data, subject = pack(report, job=self._job, epoch=ticket.epoch), subjects.report(self._job)
        try:
            ack, _ = unpack(await self._bus.request(subject, data, deadline_s=HAND_OVER_S), Ack)
        except PenstockError as error:
            logger.info("ticket %d is redelivered: %s", seq, error)
            return False
        return ack.ok

    async def _keep(self, delivery: Delivery, end: float) -> None:
        """Extend the lease of a ticket while work proceeds or waits, but never past the deadline ``end``."""
        before: int | None = -1
        while time.monotonic() < end:
            await asyncio.sleep(ACK_WAIT_S / 4)
            now = self._progress()
            if now != before or now is None or self._asking.oldest is not None:
                await delivery.in_progress()
            before = now
