"""Bytes of FEEDBACK by job, as the stream itself has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.services.coordinator import shares as shares_module
from penstock.services.coordinator.feedback.ingest import Ingest
from penstock.services.coordinator.shares import EntryShares, FeedbackShares
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus

DEADLINE_S = 30


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_job_that_floods_is_refused_and_no_other(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "LOOK_S", 0.05)
    monkeypatch.setattr(shares_module, "LOOKED_AT", 0.0)
    monkeypatch.setattr(shares_module, "PLACES", 1)
    state = await bus.stream_state(subjects.FEEDBACK)
    shares = FeedbackShares(bus, 500_000 / state.max_bytes)
    following = asyncio.create_task(shares.run())
    try:
        for _ in range(6):
            await bus.publish(subjects.feedback("job_a"), b"a" * 100_000)
        await bus.publish(subjects.feedback("job_b"), b"b" * 1000)
        await until(lambda: not shares.has_room("job_a", 1) and shares._used["job_b"] > 1000)
        assert shares.has_room("job_b", 100_000)
        later = FeedbackShares(bus, 500_000 / state.max_bytes)  # what another process took counts, too
        reading = asyncio.create_task(later.run())
        await until(lambda: not later.has_room("job_a", 1))
        assert later.has_room("job_b", 100_000)
        reading.cancel()
        newest = await bus.last(subjects.FEEDBACK, subjects.feedback("job_a"))
        assert newest is not None
        await bus.purge(subjects.FEEDBACK, subjects.feedback("job_a"), below_seq=newest.seq)
        await until(lambda: shares.has_room("job_a", 300_000))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def test_what_waits_for_the_index_is_shared_between_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.coordinator.feedback.ingest.MAX_UNPROJECTED", 1000)
    ingest = Ingest(None, None)  # type: ignore[arg-type]  neither is asked
    ingest._recent = dict.fromkeys(map(str, range(950)))  # type: ignore[arg-type]
    ingest._of_job["flood"] = 950
    assert ingest._is_full(1, "flood")
    assert not ingest._is_full(40, "other")


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
