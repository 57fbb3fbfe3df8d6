"""Dead letters: finds messages that used up their deliveries, and reads, shows and deletes their copies in DEAD.

The server sends one advisory about such a message. If no coordinator listens then, the advisory is lost, so the work
queues are scanned, too. A message that was delivered, was not acknowledged and is not under lease is dead.
The server does not say which messages are under lease, only how many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.leader.effects import ATTEMPTS, DEAD_HEADERS, REASON, SEQUENCE, STREAM
from penstock.services.coordinator.leader.leader_rpc import Leader
from penstock.services.coordinator.training.supply import LiveDeadLetter
from penstock.shared.errors import NotFound, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import DRAW_HEADER, Ticket
from penstock.shared.protocol.parts import PART, PARTS, count_of
from penstock.shared.protocol.trajectory import decode_group, parse_group_header
from penstock.shared.transport.bus import MSG_ID, Bus, Message

__all__ = [
    "DeadLetter",
    "DeadLetterQueue",
    "DeadLetterScanner",
    "Suspects",
    "header_number",
    "origin_of",
    "payload_of",
    "read_dead_letters",
]

Row = dict[str, Any]

logger = logging.getLogger(__name__)
WORKERS = {subjects.TICKETS: "rollout", subjects.RAW: "reward"}
"""Service that consumes each work queue, by the queue's stream. The consumer is named after the service and the job."""
SCAN_EVERY_S = 5.0
SUSPECT_LEASES = 2.0
"""A message counts as dead only after it has looked dead for this many lease durations."""
LIVE = frozenset({subjects.INTERACTIONS, subjects.FEEDBACK})
"""Streams whose dead letters belong to no draw."""
SHOWN_BYTES = 4096
"""Maximum number of bytes of a payload that the API shows."""


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
    """Separates the dead messages of one queue from the messages that workers still hold under a lease. Pure; callers
    pass the time in."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def dead(
        self, delivered: Mapping[int, str], *, num_leased: int, held: Collection[str], now: float, ripe_s: float
    ) -> list[int]:
        """Return the stream sequence numbers of the messages that are certainly dead.

        Args:
            delivered: stream sequence number -> draw of the messages that were delivered and are still in the queue.
            num_leased: number of these messages that are under lease, counted before the messages were listed.
            held: draws that live workers report to hold.
            now: monotonic seconds.
            ripe_s: seconds for which a message must look dead while others are under lease. While none is, half of this
                time is enough. It is not 0, because a restarted server reports no leases at first.
        """
        num_dead = len(delivered) - num_leased
        suspects = [seq for seq, draw in delivered.items() if draw not in held]
        self._since = {seq: self._since.get(seq, now) for seq in suspects} if num_dead > 0 else {}
        if num_dead <= 0 or len(suspects) > num_dead:  # which of them is not known yet
            return []
        if any(now - self._since[seq] < (ripe_s if num_leased else ripe_s / 2) for seq in suspects):
            return []
        return sorted(suspects)


class DeadLetterScanner:
    """Finds dead messages of all jobs, and passes them to the leaders of these jobs."""

    def __init__(self, bus: Bus, members: Members, runners: Mapping[str, Leader]) -> None:
        self._bus, self._members, self._runners = bus, members, runners
        self._suspects: dict[_Queue, Suspects] = {}

    async def run(self) -> None:
        """Receive advisories and scan until cancelled."""
        advisories: asyncio.Queue[tuple[str, int]] = asyncio.Queue(maxsize=10_000)

        def on_advisory(stream: str, consumer: str, seq: int) -> None:
            if stream in WORKERS and not advisories.full():
                advisories.put_nowait((stream, seq))

        await self._bus.dead_letters(on_advisory)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_advisories(advisories))
            tasks.create_task(self._scan_forever())

    async def _take_advisories(self, advisories: asyncio.Queue[tuple[str, int]]) -> None:
        while True:
            stream, seq = await advisories.get()
            await _leave_to_scan(self._take(stream, seq))

    async def _take(self, stream: str, seq: int) -> None:
        message = await self._bus.get(stream, seq)
        queue = _Queue(stream, message.subject.partition(".")[2])
        if _name_of(stream, message) not in self._held(queue):  # otherwise a worker was late: leave it to the scan
            await self._hand_over(queue, message)

    async def _scan_forever(self) -> None:
        while True:
            await asyncio.sleep(SCAN_EVERY_S)
            await _leave_to_scan(self.scan())

    async def scan(self) -> None:
        """Scan the work queues of every job that this coordinator leads."""
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
        except NotFound:  # no worker has fetched from it yet
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
                await _leave_to_scan(self._hand_over(queue, message))

    def _held(self, queue: _Queue) -> set[str]:
        """Return the draws that live workers hold, according to their heartbeats."""
        return {
            str(draw)
            for member in self._members.of(WORKERS[queue.stream], time.monotonic())
            for draw in member.beat.jobs.get(queue.job, {}).get("holds", [])
        }

    async def _hand_over(self, queue: _Queue, message: Message) -> None:
        """Pass a dead message to the leader of its job. If no leader is ready, leave the message to the next scan, or
        to the end of the job."""
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
        await runner.on_dead_message(
            queue.stream, message.seq, draw_of(queue.stream, message), reason=reason, attempts=attempts
        )


async def _leave_to_scan(work: Awaitable[None]) -> None:
    """Run ``work``; log Unavailable and NotFound instead of raising them, because the next scan repeats the work."""
    try:
        await work
    except (Unavailable, NotFound) as error:
        logger.info("dead letters wait for the next scan: %s", error)


def draw_of(stream: str, message: Message) -> Draw | None:
    """Return the training draw that a message of a work queue names in its headers, or None."""
    try:
        if stream == subjects.RAW:
            return parse_group_header(message.headers).draw
        text = message.headers.get(DRAW_HEADER)
        return Draw.parse(text) if text else None
    except (ProtocolError, ValueError):
        return None


def _name_of(stream: str, message: Message) -> str:
    """Return the draw of a message in the form in which heartbeats list the draws that a worker holds; '' if
    unknown."""
    draw = draw_of(stream, message)
    if draw is None and stream == subjects.TICKETS:
        try:
            draw = unpack(message.data, Ticket)[0].draw
        except ProtocolError:
            return ""
    return str(draw) if draw is not None else ""


def _flaw_of(stream: str, message: Message) -> str:
    """Return why no worker can read the message, or ''."""
    try:
        if stream == subjects.TICKETS:
            unpack(message.data, Ticket)
        else:
            decode_group(message.data)
    except ProtocolError as error:
        return f", undecodable: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Copy of a dead message in DEAD; a large payload takes several messages there.

    Attributes:
        first: message with part 0 of the payload. If DEAD lacks part 0, each other part is a dead letter by itself,
            with that part as ``first``.
        places: position in the payload (from 0) and stream sequence number in DEAD of each message.
    """

    first: Message
    places: list[tuple[int, int]]

    @property
    def job(self) -> str:
        """Job of the dead letter."""
        return self.first.subject.rpartition(".")[2]

    @property
    def stream(self) -> str:
        """Stream of the message that the dead letter copies."""
        return origin_of(self.first)[0]


async def read_dead_letters(bus: Bus, job: str, *, start_seq: int = 1) -> list[DeadLetter]:
    """Read the dead letters of a job (`*`: of all jobs), oldest first, without payloads. Raises Unavailable."""
    found, rest = dict[tuple[str, str, int], DeadLetter](), list[Message]()
    dead_letters = list[DeadLetter]()
    for message in await bus.read(subjects.DEAD, subjects.dead(job), start_seq=start_seq, headers_only=True):
        if PART in message.headers:
            rest.append(message)
            continue
        dead_letters.append(DeadLetter(message, [(0, message.seq)]))
        found[message.subject, *origin_of(message)] = dead_letters[-1]
    for message in rest:
        stream, seq = origin_of(message)
        place = header_number(message.headers[PART])
        key = message.subject, stream, seq - place
        if key in found:
            found[key].places.append((place, message.seq))
        else:
            dead_letters.append(DeadLetter(message, [(place, message.seq)]))
    return dead_letters


async def payload_of(bus: Bus, dead_letter: DeadLetter) -> tuple[bytes, int]:
    """Join the parts of a dead letter's payload that are still in the stream DEAD. Return the joined bytes and the
    number of parts found.

    Raises:
        Unavailable: the parts cannot be read.
    """
    places = dict(dead_letter.places)
    found = await bus.get_many(subjects.DEAD, places.values())
    pieces = [found[places[place]].data for place in sorted(places) if places[place] in found]
    return b"".join(pieces), len(pieces)


def origin_of(message: Message) -> tuple[str, int]:
    """Return the stream and the stream sequence number of the original message, of which ``message`` is a copy in
    DEAD."""
    return message.headers.get(STREAM, ""), header_number(message.headers.get(SEQUENCE))


def header_number(text: str | None) -> int:
    """Return the number in a header; 0 if it is malformed."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else 0


class DeadLetterQueue:
    """Dead letters of the stream DEAD, oldest first. The id of a dead letter is its stream sequence number in DEAD.

    Every method but ``page`` raises NotFound if the job has no such dead letter.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def page(self, job: str, *, after: int, limit: int) -> list[Row]:
        """Return a row for each of at most ``limit`` dead letters with an id above ``after``.

        A row has ``id``, ``time``, ``stream``, ``sequence``, ``attempts``, ``reason`` and ``draw`` (or None).
        """
        found = await self._bus.read(subjects.DEAD, subjects.dead(job), start_seq=after + 1, headers_only=True)
        return [_dead_letter_row(message) for message in found if PART not in message.headers][:limit]

    async def show(self, job: str, id: int) -> Row:
        """Return one row of ``page`` with ``nbytes``, ``headers`` and ``content``."""
        message = await self._get(job, id)
        return {
            **_dead_letter_row(message),
            "nbytes": len(message.data),
            "headers": dict(message.headers),
            "content": _content(message),
        }

    async def drop(self, job: str, id: int) -> None:
        """Delete a dead letter with all its parts."""
        for _, seq in reversed((await self._find(job, id)).places):
            await self._bus.delete_message(subjects.DEAD, seq)

    async def check_replayable(self, job: str, id: int) -> None:
        """Raise NotFound if a dead letter cannot be replayed: it has no draw, and is neither an interaction nor
        feedback."""
        if origin_of(await self._get(job, id))[0] not in LIVE:
            await self.draw(job, id)

    async def live(self, job: str, id: int) -> LiveDeadLetter | None:
        """Return the interaction or feedback that a dead letter copies, or None if it is neither.

        Raises:
            NotFound: no such dead letter.
            ProtocolError: some of its parts are missing.
        """
        stream, seq = origin_of(await self._get(job, id))
        if stream not in LIVE:
            return None
        dead_letter = await self._find(job, id)
        data, count = await payload_of(self._bus, dead_letter)
        missing = count_of(dead_letter.first.headers) - count
        if missing:
            raise ProtocolError(f"{missing} parts of dead letter {id} are missing: {subjects.DEAD} was full")
        headers = {
            name: value
            for name, value in dead_letter.first.headers.items()
            if name not in {*DEAD_HEADERS, PARTS, MSG_ID}
        }
        return LiveDeadLetter(stream, seq, headers, data)

    async def draw(self, job: str, id: int) -> Draw:
        """Return the draw of a dead letter. Raises NotFound: no such dead letter, or it has no draw."""
        message = await self._get(job, id)
        draw = _draw(message)
        if draw is None:
            raise NotFound(f"dead letter {id} stood for no draw: there is nothing to ask for again")
        return draw

    async def _find(self, job: str, id: int) -> DeadLetter:
        for dead_letter in await read_dead_letters(self._bus, job, start_seq=id):
            if dead_letter.first.seq == id:
                return dead_letter
        raise NotFound(f"job '{job}' has no dead letter {id}")

    async def _get(self, job: str, id: int) -> Message:
        with contextlib.suppress(NotFound):
            message = await self._bus.get(subjects.DEAD, id)
            if message.subject == subjects.dead(job):
                return message
        raise NotFound(f"job '{job}' has no dead letter {id}")


def _dead_letter_row(message: Message) -> Row:
    draw, headers = _draw(message), message.headers
    return {
        "id": message.seq,
        "time": message.time,
        "stream": origin_of(message)[0],
        "sequence": origin_of(message)[1],
        "attempts": header_number(headers.get(ATTEMPTS)),
        "reason": headers.get(REASON, ""),
        "draw": None if draw is None else str(draw),
    }


def _draw(message: Message) -> Draw | None:
    stream, _ = origin_of(message)
    return draw_of(subjects.RAW if stream == subjects.EXPERIENCE else stream, message)


def _content(message: Message) -> Any:
    """Return the payload for display: the fields of a ticket, or the first bytes of anything else."""
    if origin_of(message)[0] == subjects.TICKETS:
        with contextlib.suppress(ProtocolError):
            return msgspec.to_builtins(unpack(message.data, Ticket)[0])
    return message.data[:SHOWN_BYTES].decode("utf-8", "backslashreplace")
