"""Shares of FEEDBACK by job and key, counted from the bytes in the stream itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.services.coordinator import shares as shares_module
from penstock.services.coordinator.feedback.ingest import Ingest
from penstock.services.coordinator.shares import EntryShares, FeedbackShares
from penstock.shared.protocol import subjects
from penstock.shared.protocol.live.interaction import (
    SENDERS_HEADER,
    Feedback,
    sender_number,
    senders_header,
    senders_of,
)
from penstock.shared.transport.bus import Bus, Outgoing

DEADLINE_S = 30


def item(job: str, key_id: str) -> Feedback:
    return Feedback(id="f", job=job, kind="metric", key_id=key_id, received=0.0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_job_that_floods_is_refused_and_no_other(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "POLL_S", 0.05)
    monkeypatch.setattr(shares_module, "LOOKED_AT", 0.0)
    monkeypatch.setattr(shares_module, "PLACES", 1)
    state = await bus.stream_state(subjects.FEEDBACK)
    shares = FeedbackShares(bus, 500_000 / state.max_bytes)
    following = asyncio.create_task(shares.run())
    try:
        for _ in range(6):
            await bus.publish(subjects.feedback("job_a"), b"a" * 100_000)
        await bus.publish(subjects.feedback("job_b"), b"b" * 1000)
        await until(lambda: not shares.has_room("job_a", "key", 1) and "job_b" in shares._jobs)
        assert shares.has_room("job_b", "key", 100_000)
        later = FeedbackShares(bus, 500_000 / state.max_bytes)  # items that another process accepted count, too
        reading = asyncio.create_task(later.run())
        await until(lambda: not later.has_room("job_a", "key", 1))
        assert later.has_room("job_b", "key", 100_000)
        reading.cancel()
        newest = await bus.last(subjects.FEEDBACK, subjects.feedback("job_a"))
        assert newest is not None
        await bus.purge(subjects.FEEDBACK, subjects.feedback("job_a"), below_seq=newest.seq)
        await until(lambda: shares.has_room("job_a", "key", 300_000))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_key_that_floods_a_job_is_refused_and_no_other_key_of_it(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares_module, "POLL_S", 0.05)
    monkeypatch.setattr(shares_module, "LOOKED_AT", 0.0)
    monkeypatch.setattr(shares_module, "PLACES", 1)
    state = await bus.stream_state(subjects.FEEDBACK)
    shares = FeedbackShares(bus, 500_000 / state.max_bytes)
    following = asyncio.create_task(shares.run())
    try:
        for _ in range(4):  # one message holds items of several keys
            headers = {SENDERS_HEADER: senders_header([("flood", 90_000), ("flood", 20_000), ("other", 1000)])}
            await bus.publish(subjects.feedback("job_a"), b"a" * 110_000, headers=headers)
        whole = [Outgoing(subjects.feedback("job_a"), b"a" * (2 << 20), {SENDERS_HEADER: senders_header([("big", 9)])})]
        await until(lambda: not shares.has_room("job_a", "flood", 50_000))
        assert shares.has_room("job_a", "other", 40_000) and shares.has_room("job_a", "third", 40_000)
        assert shares.has_room("job_b", "flood", 300_000), "it is that job's room alone"
        newest = await bus.last(subjects.FEEDBACK, subjects.feedback("job_a"))
        assert newest is not None
        await bus.purge(subjects.FEEDBACK, subjects.feedback("job_a"), below_seq=newest.seq)
        await until(lambda: shares.has_room("job_a", "flood", 300_000))
        await bus.publish_whole(whole)  # in parts, of which only the first one names the key
        of_job = shares._jobs["job_a"]
        await until(lambda: of_job.by_sender[sender_number("big")] > 2 << 20)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def test_an_undecodable_senders_header_names_no_key() -> None:
    assert senders_of({SENDERS_HEADER: senders_header([("a", 1), ("b", 2), ("a", 3)])}) == {
        sender_number("a"): 4, sender_number("b"): 2,
    }  # fmt: skip
    for text in ("", "x", "1:2:3", "zz:1", "1:-"):
        assert not senders_of({SENDERS_HEADER: text}), text


def test_room_for_unindexed_items_is_shared_between_jobs_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.coordinator.feedback.ingest.MAX_UNPROJECTED", 1000)
    ingest = Ingest(None, None)  # type: ignore[arg-type]  neither is asked
    ingest._items.add("job", "flood", 910)
    assert ingest._is_full(1, item("job", "flood"))
    assert not ingest._is_full(30, item("job", "calm")), "another key of the same job"
    assert not ingest._is_full(80, item("other", "flood"))
    ingest._items.add("job", "flood", -910)
    monkeypatch.setattr("penstock.services.coordinator.feedback.ingest.MAX_UNPROJECTED_BYTES", 1000)
    ingest._bytes.add("job", "flood", 910)
    assert ingest._is_full(1, item("job", "flood"))
    assert not ingest._is_full(1, item("job", "calm")) and not ingest._is_full(1, item("other", "flood"))
    ingest._bytes.add("job", "flood", -910)
    assert not ingest._items._by and not ingest._bytes._by, "keys without waiting items are removed"


async def test_a_key_waits_for_room_behind_its_own_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.coordinator.feedback.ingest.ROOM_S", DEADLINE_S)
    ingest = Ingest(None, None)  # type: ignore[arg-type]  neither is asked
    async with ingest._turn("job", "flood"):
        async with asyncio.timeout(DEADLINE_S), ingest._turn("job", "calm"):
            assert len(ingest._queues) == 2
        behind = asyncio.create_task(ingest._wait_for_room([item("job", "flood")]))
        await until(lambda: ingest._queues["job", "flood"][1] == 2)
        assert not behind.done()
    await behind
    assert not ingest._queues


def test_entries_count_until_they_end() -> None:
    shares = EntryShares(0.5)
    shares.max_bytes = 10_000
    shares.put("k1", "a", 3000, 1e12)
    shares.put("k2", "a", 1000, 1.0)  # ended long ago
    assert shares.has_room("a", 1000)
    assert not shares.has_room("a", 2000)
    assert shares.has_room("b", 3000)
    shares.put("k1", "a", 1000, 1e12)
    assert shares.has_room("a", 3000)
    shares.remove("k1")
    assert not shares._used
