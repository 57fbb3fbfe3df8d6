"""Dead letters: messages past their deliveries are found, and what nobody can use is kept in DEAD with the reason.

The server tells of a message past its deliveries once, to whoever listens (an advisory). While no coordinator does,
that is lost; so the work queues are also scanned. A message that was delivered, was not acknowledged and is not under
lease is dead; which ones are under lease the server does not tell, only how many.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass

from penstock.services.coordinator.leader_rpc import Leader
from penstock.services.coordinator.members import Members
from penstock.shared.errors import NotFound, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import DRAW_HEADER, Ticket
from penstock.shared.protocol.trajectory import decode_group, parse_group_header
from penstock.shared.transport.bus import Bus, Message

__all__ = ["DeadLetters", "Suspects"]

logger = logging.getLogger(__name__)

WORKERS = {subjects.TICKETS: "rollout", subjects.RAW: "reward"}
"""Work queue -> service that takes from it; its consumer is named after it and the job."""
SCAN_EVERY_S = 5.0
SUSPECT_LEASES = 2.0
"""A message must look dead for this many leases."""


@dataclass(frozen=True, slots=True)
class _Queue:
    """One work queue of one job."""

    stream: str
    job: str

    @property
    def subject(self) -> str:
        return (subjects.tickets if self.stream == subjects.TICKETS else subjects.raw)(self.job)

    @property
    def durable(self) -> str:
        return f"{WORKERS[self.stream]}-{self.job}"


class Suspects:
    """Tells dead messages of one queue from those under lease. Pure; time is passed in."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def dead(
        self, delivered: Mapping[int, str], *, num_leased: int, held: Collection[str], now: float, ripe_s: float
    ) -> list[int]:
        """Sequences that are dead for certain.

        Args:
            delivered: sequence -> draw of the messages that were delivered and are still in the queue.
            num_leased: how many of them are under lease, counted before they were listed.
            held: draws that live workers say they hold.
            now: monotonic seconds.
            ripe_s: how long a message must look dead while others are under lease; half as long while none is, for a
                server that starts anew forgets its leases before it counts them again.
        """
        num_dead = len(delivered) - num_leased
        suspects = [seq for seq, draw in delivered.items() if draw not in held]
        self._since = {seq: self._since.get(seq, now) for seq in suspects} if num_dead > 0 else {}
        if num_dead <= 0 or len(suspects) > num_dead:  # which of them cannot be told yet
            return []
        if any(now - self._since[seq] < (ripe_s if num_leased else ripe_s / 2) for seq in suspects):
            return []
        return sorted(suspects)


class DeadLetters:
    """Finds dead messages of all jobs and has their leaders bury them."""

    def __init__(self, bus: Bus, members: Members, runners: Mapping[str, Leader]) -> None:
        self._bus, self._members, self._runners = bus, members, runners
        self._suspects: dict[_Queue, Suspects] = {}

    async def run(self) -> None:
        """Listen and scan until cancelled."""
        told: asyncio.Queue[tuple[str, int]] = asyncio.Queue(maxsize=10_000)

        def hear(stream: str, consumer: str, seq: int) -> None:
            if stream in WORKERS and not told.full():
                told.put_nowait((stream, seq))

        await self._bus.dead_letters(hear)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_told(told))
            tasks.create_task(self._scan_forever())

    async def _take_told(self, told: asyncio.Queue[tuple[str, int]]) -> None:
        while True:
            stream, seq = await told.get()
            await _leave_to_scan(self._take(stream, seq))

    async def _take(self, stream: str, seq: int) -> None:
        message = await self._bus.get(stream, seq)
        queue = _Queue(stream, message.subject.partition(".")[2])
        if _name_of(stream, message) not in self._held(queue):  # else a worker that was late; the scan knows more
            await self._bury(queue, message)

    async def _scan_forever(self) -> None:
        while True:
            await asyncio.sleep(SCAN_EVERY_S)
            await _leave_to_scan(self.scan())

    async def scan(self) -> None:
        """Look through the work queues of every job that is led here."""
        for stream in WORKERS:
            counts = await self._bus.subject_counts(stream)
            for job in list(self._runners):
                queue = _Queue(stream, job)
                if counts.get(queue.subject):
                    await self._scan_queue(queue, counts[queue.subject])
        self._suspects = {queue: known for queue, known in self._suspects.items() if queue.job in self._runners}

    async def _scan_queue(self, queue: _Queue, count: int) -> None:
        try:
            state = await self._bus.consumer_state(queue.stream, queue.durable)
        except NotFound:  # nobody ever took from it
            return
        if count <= state.pending + state.ack_pending:
            self._suspects.pop(queue, None)
            return
        messages = await self._bus.walk(queue.stream, queue.subject, last_seq=state.delivered_seq)
        clock = time.monotonic()
        dead = self._suspects.setdefault(queue, Suspects()).dead(
            {message.seq: _name_of(queue.stream, message) for message in messages},
            num_leased=state.ack_pending, held=self._held(queue), now=clock, ripe_s=SUSPECT_LEASES * state.ack_wait_s,
        )  # fmt: skip
        for message in messages:
            if message.seq in dead:
                logger.warning("%s: message %d of %s is past its deliveries", queue.job, message.seq, queue.stream)
                await _leave_to_scan(self._bury(queue, message))

    def _held(self, queue: _Queue) -> set[str]:
        """Draws that live workers say they hold."""
        return {
            str(draw)
            for member in self._members.of(WORKERS[queue.stream], time.monotonic())
            for draw in member.beat.jobs.get(queue.job, {}).get("holds", [])
        }

    async def _bury(self, queue: _Queue, message: Message) -> None:
        """Hand it to the leader of its job; without one here it stays, for the next scan or the end of its job."""
        runner = self._runners.get(queue.job)
        if runner is None or not runner.ready:
            return
        attempts = (await self._bus.consumer_state(queue.stream, queue.durable)).max_deliver
        try:
            found = await self._bus.get_whole(queue.stream, [message.seq])
            flaw = _flaw_of(queue.stream, found[message.seq]) if message.seq in found else ", parts of it are missing"
        except ProtocolError as error:
            flaw = f", undecodable: {error}"
        reason = f"max deliveries{flaw}"
        await runner.bury(queue.stream, message.seq, draw_of(queue.stream, message), reason=reason, attempts=attempts)


async def _leave_to_scan(work: Awaitable[None]) -> None:
    """Do it, or leave it to the next scan: the bus is away, or somebody else was faster."""
    try:
        await work
    except (Unavailable, NotFound) as error:
        logger.info("dead letters wait for the next scan: %s", error)


def draw_of(stream: str, message: Message) -> Draw | None:
    """The training draw that a message of a work queue stands for, by its headers; None where it stands for none."""
    try:
        if stream == subjects.RAW:
            return parse_group_header(message.headers).draw
        text = message.headers.get(DRAW_HEADER)
        return Draw.parse(text) if text else None
    except (ProtocolError, ValueError):
        return None


def _name_of(stream: str, message: Message) -> str:
    """The draw as the worker that holds the message names it."""
    draw = draw_of(stream, message)
    if draw is None and stream == subjects.TICKETS:
        try:
            draw = unpack(message.data, Ticket)[0].draw
        except ProtocolError:
            return ""
    return str(draw) if draw is not None else ""


def _flaw_of(stream: str, message: Message) -> str:
    """Why nobody could read it, or ''."""
    try:
        if stream == subjects.TICKETS:
            unpack(message.data, Ticket)
        else:
            decode_group(message.data)
    except ProtocolError as error:
        return f", undecodable: {error}"
    return ""
