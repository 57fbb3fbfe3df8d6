"""Writes items of feedback in batches: joins items that arrive within a moment into one message, and answers their
senders once the message is on disk.

Each job has one lane, a queue of items to send. A lane sends its items when the oldest one has waited GATHER_S, or when
it is full. At most IN_FLIGHT messages of a lane wait for their acknowledgement; meanwhile the next message grows.

If the sender of an item can post its id again, ``Ingest`` looks the id up before it sends the item: first among the
items of this process that are not in the projection (SQLite tables of stored items) yet, then, for all items of a
message at once, in the projection.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.shared.errors import (
    Flaw,
    Invalid,
    PenstockError,
    ProtocolError,
    RateLimited,
    StreamFull,
    TooLarge,
    Unavailable,
)
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import MAX_INLINE_BYTES, pack
from penstock.shared.protocol.live.interaction import SENDERS_HEADER, Feedback, FeedbackBatch, senders_header
from penstock.shared.runtime import metrics
from penstock.shared.runtime.tasks import unexpected
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["Index", "Ingest", "Stored"]

GATHER_S = 0.002
GROUP_ITEMS = 256
GROUP_BYTES = 512 << 10
IN_FLIGHT = 2
MAX_UNPROJECTED, MAX_UNPROJECTED_BYTES = 65_536, 256 << 20
"""Maximum number of accepted items, and of their bytes, that the projection (index) lacks; beyond it items are
refused."""
MAX_SHARE = 0.95
"""Maximum share that one job may take of the room that the other jobs leave. Within a job, an API key may take the same
share of the room that the other keys of the job leave."""
FREEING = frozenset({"retraction", "release", "drop"})
"""Kinds of items that decide on other items. They are accepted even if the job has used its share of FEEDBACK, because
they free room."""
ROOM_S = 2.0
MAX_QUEUED, MAX_QUEUED_BYTES = 32_768, 64 << 20
"""Maximum number of items, and of their bytes, that wait for room at the same time (at most ROOM_S seconds each);
further items do not wait, and are refused if there is no room."""
ACK_S = 4.0

ITEMS = metrics.counter("feedback", "Items of feedback by what became of the post.", ("metric", "decision"))
ACK_SECONDS = metrics.histogram("ingest_ack_seconds", "From an item's arrival to the proof that it is on disk.", ())
GROUP = metrics.histogram("ingest_group_items", "Items that one message carries.", ())

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Stored:
    """Reply about a stored item. ``seq`` is the stream sequence number of its message, or None if the message has
    several parts; ``duplicate`` is True if an earlier request stored the item."""

    id: str
    seq: int | None
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about a stored item: its content hash (``fingerprint``), its revision, the stream sequence number of its
    message, and its sender."""

    fingerprint: str
    revision: int
    seq: int | None
    key_id: str


class Index(Protocol):
    """Index of stored items by id."""

    async def known(self, ids: Sequence[str]) -> dict[str, Known]:
        """Return the stored items among ``ids``, by id. Raises Unavailable while the index is incomplete."""
        ...


@dataclass(slots=True)
class _Entry:
    item: Feedback
    nbytes: int
    chosen: bool
    arrived: float
    done: asyncio.Future[Stored]


@dataclass(slots=True)
class _Lane:
    """Items of one job that wait to be sent."""

    waiting: list[_Entry] = field(default_factory=list)
    nbytes: int = 0
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    sender: asyncio.Task[None] | None = None


class _Taken:
    """Counts accepted items (or their bytes) that are not in the projection yet: in total, by job, and by job and
    key."""

    def __init__(self) -> None:
        self.total = 0
        self._by: Counter[str | tuple[str, str]] = Counter()

    def add(self, job: str, key_id: str, number: int) -> None:
        """Add ``number`` (may be negative) to the count of a key."""
        self.total += number
        for owner in (job, (job, key_id)):
            self._by[owner] += number
            if not self._by[owner]:
                del self._by[owner]

    def has_room(self, job: str, key_id: str, more: int, most: int) -> bool:
        """Return True if a key may add ``more`` items (or bytes). All jobs together may have ``most``. Of the room that
        the other jobs leave, a job may use at most MAX_SHARE; of the room that the job's other keys leave, the key may
        use at most MAX_SHARE."""
        of_job, of_key = self._by[job], self._by[job, key_id]
        room = math.ceil(MAX_SHARE * (most - (self.total - of_job)))
        return of_key + more <= math.ceil(MAX_SHARE * (room - (of_job - of_key)))


class Ingest:
    """Stores items of feedback durably in FEEDBACK, and limits the items of each job and key that the index has not
    read yet."""

    def __init__(self, bus: Bus, index: Index) -> None:
        self._bus, self._index = bus, index
        self._lanes: dict[str, _Lane] = {}
        self._recent: dict[str, _Entry] = {}
        self._items, self._bytes = _Taken(), _Taken()
        self._queued = self._queued_nbytes = 0
        self._queues: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}
        """(job, key) -> a lock that orders the requests waiting for room, and the number of these requests."""
        self.has_room: Callable[[str, str, int], bool] = lambda job, key_id, nbytes: True
        """Callback ``(job, key_id, nbytes)``: returns True if the key may store ``nbytes`` more bytes in FEEDBACK for
        the job."""
        self._freed = asyncio.Event()
        self._unprojected: dict[int, list[_Entry]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def recent(self, id: str) -> Feedback | None:
        """Return the feedback item ``id`` if it is so new that queries may not find it yet, or None."""
        entry = self._recent.get(id)
        if entry is None or not entry.done.done() or entry.done.cancelled() or entry.done.exception() is not None:
            return None
        return entry.item

    async def add(self, items: Sequence[tuple[Feedback, bool]]) -> list[Stored | PenstockError]:
        """Store items of feedback. Each item comes with a flag, which is True if its sender can post the same id again.
        For each item return ``Stored``, or the error that refuses it.

        Returns once each one is on disk or refused: StreamFull, Unavailable (it may be stored or not), Invalid (the id
        has other content already), TooLarge, RateLimited (too much feedback of the job or key is undecided). A sender
        that is faster than the projection waits.
        """
        if items and self._is_full(len(items), items[0][0]):
            await self._wait_for_room([item for item, _ in items])
        begun = [self._begin(item, chosen) for item, chosen in items]
        pending = {found[0].done for found in begun if not isinstance(found, PenstockError)}
        if pending:
            await asyncio.wait(pending)
        results = [_result(found) for found in begun]
        for (item, _), result in zip(items, results, strict=True):
            ITEMS.labels(item.metric or item.kind, _decision(result)).inc()
        return results

    def projected(self, seq: int) -> None:
        """Stop tracking the items up to the stream sequence number ``seq`` of FEEDBACK, because the projection now
        contains them."""
        for place in [place for place in self._unprojected if place <= seq]:
            for entry in self._unprojected.pop(place):
                self._forget(entry)
        self._freed.set()

    async def close(self) -> None:
        """Wait until all accepted items are on disk, but at most ACK_S seconds."""
        tasks = [*self._sending, *(lane.sender for lane in self._lanes.values() if lane.sender is not None)]
        if tasks:
            await asyncio.wait(tasks, timeout=ACK_S)

    def _begin(self, item: Feedback, chosen: bool) -> tuple[_Entry, bool] | PenstockError:
        """Queue an item and return ``(its entry, False)``, or ``(entry of an equal earlier item, True)`` without
        queueing.

        An earlier item counts while it is queued or not yet projected. Return the error if the item is refused.
        """
        earlier = self._recent.get(item.id)
        try:
            if earlier is not None and _compare(item, _known(earlier.item)):
                return earlier, True
            return self._enter(item, chosen), False
        except PenstockError as error:
            return error

    def _is_full(self, more: int, item: Feedback) -> bool:
        """Return True if the job or key of ``item`` has no room for ``more`` items; others may still have room."""
        job, key_id = item.job, item.key_id
        has_room = self._items.has_room(job, key_id, more, MAX_UNPROJECTED)
        return not has_room or not self._bytes.has_room(job, key_id, 1, MAX_UNPROJECTED_BYTES)

    async def _wait_for_room(self, items: Sequence[Feedback]) -> None:
        """Wait, after earlier requests of the same job and key, until there is room for ``items``; give up after ROOM_S
        seconds, or at once if too many items wait already."""
        count, nbytes = len(items), sum(len(_encoder.encode(item)) for item in items)
        if self._queued + count > MAX_QUEUED or self._queued_nbytes + nbytes > MAX_QUEUED_BYTES:
            return
        self._queued, self._queued_nbytes = self._queued + count, self._queued_nbytes + nbytes
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROOM_S), self._turn(items[0].job, items[0].key_id):
                    while self._is_full(count, items[0]):
                        self._freed.clear()
                        await self._freed.wait()
        finally:
            self._queued, self._queued_nbytes = self._queued - count, self._queued_nbytes - nbytes

    @contextlib.asynccontextmanager
    async def _turn(self, job: str, key_id: str) -> AsyncIterator[None]:
        """Serialize the requests of one key for one job."""
        lock, users = self._queues.get((job, key_id)) or (asyncio.Lock(), 0)
        self._queues[job, key_id] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._queues.pop((job, key_id))
            if users > 1:
                self._queues[job, key_id] = lock, users - 1

    def _enter(self, item: Feedback, chosen: bool) -> _Entry:
        if self._is_full(1, item):
            raise StreamFull(f"{len(self._recent)} items wait to be indexed; retry in a moment")
        loop = asyncio.get_running_loop()
        nbytes = len(_encoder.encode(item))
        if item.kind not in FREEING and not self.has_room(item.job, item.key_id, nbytes):
            raise _flooded(item.job)
        entry = _Entry(item, nbytes, chosen, loop.time(), loop.create_future())
        entry.done.add_done_callback(_seen)
        if (replaced := self._recent.get(item.id)) is not None:
            self._forget(replaced)
        self._recent[item.id] = entry
        self._items.add(item.job, item.key_id, 1)
        self._bytes.add(item.job, item.key_id, nbytes)
        lane = self._lanes.get(item.job) or self._lanes.setdefault(item.job, _Lane())
        lane.waiting.append(entry)
        lane.nbytes += entry.nbytes
        if len(lane.waiting) >= GROUP_ITEMS or lane.nbytes >= GROUP_BYTES:
            lane.filled.set()
        if lane.sender is None:
            work = self._send(item.job, lane)
            lane.sender = asyncio.create_task(work, context=contextvars.Context())  # not one request's
        return entry

    async def _send(self, job: str, lane: _Lane) -> None:
        """Send the waiting items of one job (``lane``), many items in each message, until no item waits."""
        room = asyncio.Semaphore(IN_FLIGHT)
        while lane.waiting:
            await room.acquire()
            left = GATHER_S - (asyncio.get_running_loop().time() - lane.waiting[0].arrived)
            if left > 0 and not lane.filled.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await lane.filled.wait()
            group = _take(lane)
            task = asyncio.create_task(self._commit(job, group))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            task.add_done_callback(lambda _: room.release())
        lane.sender = None

    async def _commit(self, job: str, group: list[_Entry]) -> None:
        error = await unexpected(self._store(job, group))
        if error is None:
            return
        for entry in group:
            if not entry.done.done():
                self._forget(entry)
                entry.done.set_exception(error if isinstance(error, PenstockError) else _broken(error))

    async def _store(self, job: str, group: list[_Entry]) -> None:
        group = await self._unknown(group)
        if not group:
            return
        items = [entry.item for entry in group]
        data = pack(FeedbackBatch(items=items), job=job)
        name = hashlib.sha256("".join(f"{item.id}.{item.revision}\n" for item in items).encode()).hexdigest()[:32]
        headers = {SENDERS_HEADER: senders_header((entry.item.key_id, entry.nbytes) for entry in group)}
        seq, bound = await self._publish(Outgoing(subjects.feedback(job), data, headers, name))
        now = asyncio.get_running_loop().time()
        GROUP.observe(len(group))
        for entry in group:
            ACK_SECONDS.observe(now - entry.arrived)
            entry.done.set_result(Stored(entry.item.id, seq))
        self._unprojected.setdefault(bound, []).extend(group)

    async def _publish(self, message: Outgoing) -> tuple[int | None, int]:
        """Publish a message. Return its stream sequence number, and an upper bound of the stream sequence numbers of
        its parts.

        The first number is None for a message of several parts. For a message of one part, both numbers are equal.
        """
        if len(message.data) <= MAX_INLINE_BYTES:
            seq = await self._bus.publish(
                message.subject, message.data, headers=message.headers, msg_id=message.msg_id, deadline_s=ACK_S
            )
            return seq, seq
        try:
            await self._bus.publish_whole([message], deadline_s=ACK_S)
        except ProtocolError as error:
            raise TooLarge("too_large", str(error)) from None
        newest = await self._bus.last(subjects.FEEDBACK, message.subject)
        return None, newest.seq if newest is not None else 0

    async def _unknown(self, group: list[_Entry]) -> list[_Entry]:
        """Return the entries whose items are not stored yet; complete the futures of the other entries."""
        chosen = [entry.item.id for entry in group if entry.chosen]
        known = await self._index.known(chosen) if chosen else {}
        found = []
        for entry in group:
            if entry.item.id not in known:
                found.append(entry)
                continue
            earlier = known[entry.item.id]
            try:
                compared = _compare(entry.item, earlier)
            except Invalid as refusal:
                self._forget(entry)
                entry.done.set_exception(refusal)
                continue
            if compared is None:
                found.append(entry)
            else:
                self._forget(entry)
                entry.done.set_result(Stored(entry.item.id, earlier.seq, duplicate=True))
        return found

    def _forget(self, entry: _Entry) -> None:
        if self._recent.get(entry.item.id) is entry:
            del self._recent[entry.item.id]
            self._items.add(entry.item.job, entry.item.key_id, -1)
            self._bytes.add(entry.item.job, entry.item.key_id, -entry.nbytes)


def _result(found: tuple[_Entry, bool] | PenstockError) -> Stored | PenstockError:
    if isinstance(found, PenstockError):
        return found
    entry, earlier = found
    error = entry.done.exception()
    if error is not None:
        return error if isinstance(error, PenstockError) else _broken(error)
    stored = entry.done.result()
    return Stored(stored.id, stored.seq, duplicate=True) if earlier else stored


def _known(item: Feedback) -> Known:
    return Known(item.fingerprint, item.revision, None, item.key_id)


def _compare(item: Feedback, earlier: Known) -> Known | None:
    """Return ``earlier`` if ``item`` repeats it, None if ``item`` replaces it. Raises Invalid otherwise.

    Only the key that posted an item can revise it. Retractions are equal whichever key sends them.
    """
    if item.fingerprint == earlier.fingerprint:
        return earlier
    if item.key_id != earlier.key_id:
        detail = f"feedback '{item.id}' was posted with another API key, and only that one can revise it"
    elif item.revision > earlier.revision:
        return None
    else:
        detail = f"feedback '{item.id}' says something else already (revision {earlier.revision}): send a higher one"
    raise Invalid("feedback_id_reused", detail, [Flaw(pointer="/feedback_id", detail=detail)])


def _take(lane: _Lane) -> list[_Entry]:
    """Remove and return the next items to send: the oldest of ``lane``, as many as fit into one message, but at least
    one."""
    count = nbytes = 0
    for entry in lane.waiting[:GROUP_ITEMS]:
        if count and nbytes + entry.nbytes > GROUP_BYTES:
            break
        count, nbytes = count + 1, nbytes + entry.nbytes
    group, lane.waiting = lane.waiting[:count], lane.waiting[count:]
    lane.nbytes -= nbytes
    lane.filled.clear()
    if len(lane.waiting) >= GROUP_ITEMS or lane.nbytes >= GROUP_BYTES:
        lane.filled.set()
    return group


def _flooded(job: str) -> RateLimited:
    detail = (
        f"so much feedback of this key or of job '{job}' is undecided that others need the rest; wait for decisions"
    )
    return RateLimited("job_backlog_full", detail, retry_after_s=5.0)


def _seen(done: asyncio.Future[Stored]) -> None:
    """Mark the exception of a refused item as retrieved, because its sender may be gone."""
    if not done.cancelled():
        done.exception()


def _decision(result: Stored | PenstockError) -> str:
    if isinstance(result, Stored):
        return "duplicate" if result.duplicate else "accepted"
    return "unavailable" if isinstance(result, Unavailable) else "refused"


def _broken(error: BaseException) -> Unavailable:
    return Unavailable(f"feedback was not stored: {type(error).__name__}: {error}")
