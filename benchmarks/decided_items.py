"""Measures a ledger with very many decided live items: its bytes, its fold, a takeover, and a feed made from it.

Items are refused ``REFUSED_TOGETHER`` at a time (``Decided``), or admitted 64 at a time, trained, and behind a
checkpoint every 50 updates. All on a real server with fsync; the streams hold only what is undecided, in messages of
256 as ingest stores them.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from live_items import job

from penstock.services.coordinator.online.decision_feed import DecisionFeed, Funnel
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.journal import Journal, read_snapshots
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.retry import Retry
from penstock.services.coordinator.training.snapshot import digest_of, encode_snapshot
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Decided,
    Drawn,
    EndedFeedback,
    EndedInteractions,
    Event,
    JobStarted,
    PackedIds,
    SealedGroup,
    encode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, StatusBatch
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["DecidedItems", "Kind", "measure", "takeover_with_decisions"]

REFUSED_TOGETHER, ADMITTED_TOGETHER, STORED_TOGETHER = 100, 64, 256
CHECKPOINT_EVERY, WINDOW = 50, 200
REASONS = ("no_feedback", "stale", "too_many_waiting", "other_key")
BASE: dict[str, Any] = {"writer_epoch": 1, "time": 1e9}
Kind = str


@dataclass(frozen=True)
class DecidedItems:
    """A ledger of ``items`` decided items: bytes in its entries and in its snapshot, and seconds to load both.

    ``cpu_s`` is the CPU time of the load without a snapshot: on a busy machine it tells more.
    """

    items: int
    entries: int
    ledger_mib: float
    bytes_per_item: float
    fold_s: float
    cpu_s: float
    snapshot_mib: float
    load_s: float
    kept: int
    """Items that the state names."""


@dataclass(frozen=True)
class Led:
    """Seconds in which a new leader loaded the ledger and recovered; seconds and statuses of a feed that was lost."""

    decided: int
    undecided: int
    seconds: float
    cpu_s: float
    feed_s: float
    feed_cpu_s: float
    feed_statuses: int


def _ids(count: int, rng: random.Random) -> list[str]:
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def refused(items: int) -> Iterator[list[Event]]:
    """Entries that refuse this many interactions, each with one item of feedback."""
    rng = random.Random(0)
    yield [JobStarted(**BASE, config_digest="c")]
    for start in range(0, items // 2, REFUSED_TOGETHER // 2):
        count, reason = min(REFUSED_TOGETHER // 2, items // 2 - start), rng.choice(REASONS)
        end = start + count + 1
        yield [
            Decided(
                **BASE, feedback=[EndedFeedback(PackedIds(rng.randbytes(16 * count)), "rejected", reason)],
                interactions=[EndedInteractions(PackedIds(rng.randbytes(16 * count)), reason)], read_to=(end, end),
            )
        ]  # fmt: skip


def admitted(items: int) -> Iterator[list[Event]]:
    """Entries that admit, seal and train this many items of feedback, each on an interaction of its own."""
    rng = random.Random(0)
    first = Checkpointed(**BASE, number=0, version=0, digest="d" * 32, path="c", trainer_epoch=1, low_seq=0)
    yield [JobStarted(**BASE, config_digest="c"), first]
    for number, start in enumerate(range(0, items, ADMITTED_TOGETHER), 1):
        stop = min(items, start + ADMITTED_TOGETHER)
        interactions, feedback = _ids(stop - start, rng), _ids(stop - start, rng)
        admissions = [
            Admission(
                start + n, {interactions[n]: start + n + 1}, {feedback[n]: start + n + 1}, 1.0, 0, "key-1", "u" * 32,
                "feedback", 1e9, judges=["key-1"], askers=["key-2"], weight=1.0, share=1.0,
            )
            for n in range(stop - start)
        ]  # fmt: skip
        yield [
            Drawn(**BASE, start=start, stop=stop, min_version=0, deadline=2e9),
            Admitted(**BASE, admissions=admissions, low_interactions=stop + 1, low_feedback=stop + 1),
        ]
        groups = [
            SealedGroup(Draw(n), "a" * 16, n + 1, "d" * 32, number - 1, number - 1, [1.0], 512, "live", nbytes=4096)
            for n in range(start, stop)
        ]
        yield [
            BatchSealed(**BASE, number=number, revision=1, start_version=number - 1, update_index=number, groups=groups)
        ]
        then: list[Event] = [
            BatchTrained(**BASE, number=number, revision=1, version=number, digest="d" * 32, trainer_epoch=1)
        ]
        if number % CHECKPOINT_EVERY == 0:
            then.append(
                Checkpointed(
                    **BASE, number=number, version=number, digest="d" * 32, path="c", trainer_epoch=1, low_seq=stop + 1
                )
            )
        yield then


async def _append(bus: Bus, name: str, entries: Iterable[list[Event]]) -> LedgerState:
    """Append entries, many at once, and a snapshot of their fold."""
    state, window, last = LedgerState(), list[Outgoing](), b""
    for events in entries:
        fold(events, state)
        last = encode_events(events)
        window.append(Outgoing(subjects.ledger(name), last))
        if len(window) == WINDOW:
            await bus.publish_many(window)
            window = []
    await bus.publish_many(window)
    newest = await bus.last(subjects.LEDGER, subjects.ledger(name))
    assert newest is not None
    data = encode_snapshot(state, job=name, seq=newest.seq, entry=digest_of(last))
    await bus.publish_whole([Outgoing(subjects.snapshots(name), data)])
    return state


async def measure(bus: Bus, name: str, kind: Kind, items: int) -> DecidedItems:
    """Write a ledger of one kind of decisions, and load it with and without its snapshots."""
    state = await _append(bus, name, refused(items) if kind == "refused" else admitted(items))
    stored = await bus.read(subjects.LEDGER, subjects.ledger(name))
    began = time.perf_counter()
    assert await Journal(bus, name).load() == state
    load_s, snapshots = time.perf_counter() - began, await read_snapshots(bus, name)
    await bus.purge(subjects.SNAPSHOTS, subjects.snapshots(name))
    began, used = time.perf_counter(), time.process_time()
    assert await Journal(bus, name).load() == state
    cpu_s = time.process_time() - used
    fold_s, size = time.perf_counter() - began, sum(len(one.data) for one in stored)
    return DecidedItems(
        items, len(stored), size / 2**20, size / items, fold_s, cpu_s,
        snapshots[0][2] / 2**20 if snapshots else 0.0, load_s,
        sum(block.count for block in state.decided),
    )  # fmt: skip


async def takeover_with_decisions(bus: Bus, name: str, undecided: int, items: int) -> Led:
    """Lead a job again whose ledger ``measure`` wrote, with ``undecided`` items above its marks; its feed is lost."""
    rng, now = random.Random(1), time.time()
    first = (await bus.stream_state(subjects.FEEDBACK)).last_seq + 1
    for start in range(0, undecided, STORED_TOGETHER):
        batch = [
            Feedback(
                id=one, job=name, kind="metric", key_id=f"key-{n % 50}", received=now, inference=about,
                metric="rating", value=1.0,
            )
            for n, (one, about) in enumerate(
                zip(*(_ids(min(STORED_TOGETHER, undecided - start), rng) for _ in range(2)), strict=True)
            )
        ]  # fmt: skip
        await bus.publish(subjects.feedback(name), pack(FeedbackBatch(items=batch), job=name))
    journal = Journal(bus, name)
    await journal.load()
    marks = Admitted(**BASE, admissions=[], low_interactions=first, low_feedback=first)
    await journal.append([marks])
    feed = DecisionFeed(bus, name, epoch=1, funnel=Funnel(job()), retry=lambda: Retry(name))
    began, used = time.perf_counter(), time.process_time()
    await feed.resume(journal.last_seq)
    feed_s, feed_cpu_s = time.perf_counter() - began, time.process_time() - used
    assert not feed.is_behind
    statuses = 0
    async for message in bus.scan(subjects.DECISIONS, subjects.decisions(name)):
        found = unpack(message.data, StatusBatch)[0]
        statuses += len(found.items) + len(found.interactions)
    began, used = time.perf_counter(), time.process_time()
    state = await Journal(bus, name).load()
    supply = LiveSupply(bus, name, job(), epoch=2)
    await supply.recover(state)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - used
    assert len(supply.matching.unmatched) == undecided
    await asyncio.sleep(0)
    return Led(items, undecided, seconds, cpu_s, feed_s, feed_cpu_s, statuses)
