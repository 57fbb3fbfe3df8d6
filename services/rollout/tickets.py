"""Takes the tickets of one job, whatever its policy is: leases, deadlines, duplicates, answers of evaluations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from penstock.services.rollout.conversations.asking import Asking
from penstock.services.rollout.publisher import GroupPublisher
from penstock.shared.errors import ConfigError, DataError, DeadlineError, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import EvalResult, Ticket
from penstock.shared.transport.bus import Bus, Delivery

__all__ = ["LeftBehind", "TicketTaker", "Versions"]

logger = logging.getLogger(__name__)

ACK_WAIT_S = 5.0
"""A ticket whose holder gives no sign for this long goes to another worker."""
MAX_DELIVER = 5
FETCH_WAIT_S = 1.0
UNREADABLE_PAUSE_S = 0.5
LATE_PAUSE_S = 5.0
"""A ticket that cannot be answered in time comes again after this long, unless the coordinator drops its draw."""


class LeftBehind(Exception):  # noqa: N818  no error: the coordinator has its answer, or went on without
    """The policy passed the version that a ticket asks for, and versions rise."""


class Versions(Protocol):
    """The policy versions that a worker serves, one after another."""

    @property
    def version(self) -> int:
        """The one that is served now."""

    async def reach(self, wanted: Callable[[int], bool], *, deadline_s: float, what: str) -> None:
        """Wait until the version is ``wanted``. Raises DeadlineError naming ``what``."""


class TicketTaker:
    """Has each ticket answered once, within its deadline, and keeps its lease meanwhile.

    Args:
        answer: answers a ticket; its key names it among the work in hand. ConfigError, DataError and ProtocolError
            mean that it cannot be answered, DeadlineError that it comes too late, LeftBehind that it is over.
        give_up: tells the coordinator that a ticket cannot be answered, and why.
        room: tickets that may be taken now, those aside that were taken and not begun (``num_unbegun``).
        progress: grows while the work in hand goes on; None while nothing is worked at.
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
        """Work in hand -> sequence of its ticket, version it asks for."""
        self._ends: dict[str, float] = {}
        """Work in hand -> deadline of its ticket (monotonic)."""
        self._changed = asyncio.Event()
        self._draining = False
        self.num_taken = 0
        """Tickets taken and not done with."""
        self.num_unbegun = 0
        """Of those, the ones that nobody has looked at."""

    @property
    def busy(self) -> bool:
        """True if tickets are in hand."""
        return bool(self._holds)

    def drain(self) -> None:
        """Take no more tickets; ``run`` ends once those in hand are done."""
        self._draining = True
        self._changed.set()

    def look_again(self) -> None:
        """There may be more room."""
        self._changed.set()

    def status(self, publisher: GroupPublisher) -> dict[str, Any]:
        """The work in hand and the oldest wait, for a heartbeat."""
        row: dict[str, Any] = {"holds": [key.split(":", 1)[1] for key in list(self._holds)]}
        if publisher.blocked is not None:
            since, why = publisher.blocked
            row |= {"waiting_for": why, "since": since, "subject": subjects.experience(self._job)}
        elif self._asking.oldest is not None:
            since, what, subject = self._asking.oldest
            row |= {"waiting_for": what, "since": since, "subject": subject}
        return row

    async def run(self) -> None:
        """Take tickets until drained, and end with the last one in hand."""
        puller = await self._bus.pull(
            subjects.TICKETS, subjects.tickets(self._job), f"rollout-{self._job}",
            ack_wait_s=ACK_WAIT_S, max_deliver=MAX_DELIVER, max_ack_pending=4096,
        )  # fmt: skip
        async with asyncio.TaskGroup() as working:
            try:
                while (room := await self._wait_for_room()) > 0:
                    for delivery in await puller.fetch(room, FETCH_WAIT_S):
                        self.num_taken += 1
                        self.num_unbegun += 1
                        working.create_task(self._work(delivery)).add_done_callback(self._done_with)
            finally:
                await puller.close()

    async def _wait_for_room(self) -> int:
        """Tickets to fetch; 0 once drained."""
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
        """Wait until a policy has version ``oldest``, as long as the ticket may.

        Raises:
            DeadlineError: it does not come in time.
            LeftBehind: the version that the ticket asks for is not there any more.
        """
        if policy.version < oldest:
            self._asking.wait(key, f"policy version {oldest} (serving {policy.version})", subjects.MANIFESTS)
            left_s = self._ends[key] - time.monotonic()
            await policy.reach(lambda version: version >= oldest, deadline_s=left_s, what=f"version {oldest}")
            self._asking.done(key)
        if ticket.version is not None and policy.version > ticket.version:  # versions rise: it will not come again
            raise LeftBehind(f"version {ticket.version} was left behind for {policy.version}")

    async def tell(
        self,
        ticket: Ticket,
        key: str,
        rewards: list[float],
        *,
        failed: list[bool],
        greedy: list[bool],
        parts: dict[str, list[float]] | None = None,
    ) -> None:
        """Hand the coordinator what an evaluation ticket asked for."""
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
        except ProtocolError as error:  # given back: after its last delivery it becomes a dead letter
            logger.error("ticket %d is unreadable: %s", delivery.seq, error)
            await delivery.nak(UNREADABLE_PAUSE_S)
            return
        key = f"{ticket.purpose}:{ticket.draw}"
        if key in self._holds:
            seq, version = self._holds[key]
            if delivery.seq != seq and ticket.version == version:  # another leader asked again for what is in hand
                await delivery.ack()
            return  # redelivered while in hand (a stalled process): the first delivery's ack counts
        self._holds[key] = delivery.seq, ticket.version
        left_s, is_late = ticket.left_s(delivery.time), False
        self._ends[key] = time.monotonic() + left_s
        keeper = asyncio.create_task(self._keep(delivery, self._ends[key]))
        try:
            async with asyncio.timeout(left_s):
                await self._attempt(ticket, key)
        except LeftBehind as error:
            logger.info("ticket %s is over: %s", key, error)
        except (TimeoutError, DeadlineError) as error:
            logger.info("ticket %s is given back: %s", key, str(error) or "past its deadline")
            is_late = True
        finally:
            keeper.cancel()
            self._ends.pop(key, None)
            self._holds.pop(key, None)
            self._asking.done(key)
        if is_late:
            await delivery.nak(LATE_PAUSE_S)  # the coordinator alone drops a draw
        else:
            await delivery.ack()

    async def _attempt(self, ticket: Ticket, key: str) -> None:
        """Answer a ticket. One that cannot be is a failure of its own: its neighbours and the session go on."""
        try:
            await self._answer(ticket, key)
        except (ConfigError, DataError, ProtocolError) as error:
            logger.error("ticket %s cannot be answered: %s", key, error)
            await self._give_up(ticket, key, str(error))

    async def _keep(self, delivery: Delivery, end: float) -> None:
        """Extend the lease while work goes on or waits for something, never past its deadline."""
        before: int | None = -1
        while time.monotonic() < end:
            await asyncio.sleep(ACK_WAIT_S / 4)
            now = self._progress()
            if now != before or now is None or self._asking.oldest is not None:
                await delivery.in_progress()
            before = now
