"""The ledger has every decision on live items: a new leader folds it, and completes the feed of statuses from it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.services.coordinator.online import decision_feed
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.training.journal import Journal
from penstock.services.coordinator.training.ledger import fold
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import StreamFull
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import Drawn, encode_events
from penstock.shared.protocol.live.interaction import Feedback, FeedbackBatch, FeedbackStatus, StatusBatch
from penstock.shared.transport.bus import Bus
from tests.live_leader import Recorder, decided_events, record_decided

JOB = "job_x"
CONFIG = OnlineJob.parse(
    {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 2, "max_lag": 1},
        "online": {"max_wait_s": 3600, "posted": {"trusted_keys": ["k"]}},
    }
)  # fmt: skip


def posted(name: str, received: float) -> Feedback:
    body: dict[str, Any] = {
        "policy_version": 0, "prompt_token_ids": [4], "token_ids": [5, 2], "logprobs": [-0.1, -0.2], "reward": 1.0,
        "sampling": {"temperature": 1.0}, "done": True,
    }  # fmt: skip
    return Feedback(id=name, job=JOB, kind="interaction", key_id="k", received=received, body=body)


async def post_feedback(bus: Bus, *items: Feedback) -> None:
    await bus.publish(subjects.feedback(JOB), pack(FeedbackBatch(items=list(items)), job=JOB))


async def leader(bus: Bus, epoch: int) -> tuple[LiveSupply, Recorder]:
    supply = LiveSupply(bus, JOB, CONFIG, epoch=epoch)
    recorder = Recorder(bus, supply)
    await recorder.lead()
    return supply, recorder


async def feed(bus: Bus) -> list[tuple[str, str]]:
    """Return the statuses in DECISIONS, in order."""
    messages = await bus.read(subjects.DECISIONS, subjects.decisions(JOB))
    batches = [unpack(one.data, StatusBatch)[0] for one in messages if decision_feed.ENTRY_HEADER in one.headers]
    return [(status.feedback, status.status) for batch in batches for status in batch.items]


def rejected(name: str) -> FeedbackStatus:
    return FeedbackStatus(feedback=name, status="rejected", reason="feedback_full", time=1.0)


async def test_items_rejected_for_space_stay_rejected(bus: Bus) -> None:
    """The feed of statuses is lost; the new leader knows the decision from the ledger."""
    await post_feedback(bus, posted("a", time.time()), posted("b", time.time()))
    first, recorder = await leader(bus, 1)
    assert list(first.matching.examples.ready) == ["a", "b"]
    first._note(first.matching.reject(["a"], "feedback_full", time.time()))
    await recorder.record()
    await bus.purge(subjects.DECISIONS, subjects.decisions(JOB))
    second, _ = await leader(bus, 2)
    assert list(second.matching.examples.ready) == ["b"]
    await post_feedback(bus, posted("a", time.time()))
    *_, message = await bus.read(subjects.FEEDBACK, subjects.feedback(JOB))
    await second._take_message(subjects.feedback(JOB), message)
    assert list(second.matching.examples.ready) == ["b"], "also after it is read once more"


async def test_a_decision_without_a_ledger_entry_does_not_count(bus: Bus) -> None:
    """A leader that dies before it writes an entry has published no status; the next leader decides anew."""
    await post_feedback(bus, posted("a", time.time()))
    first, _ = await leader(bus, 1)
    first._note(first.matching.reject(["a"], "feedback_full", time.time()))
    await first.flush()
    assert ("a", "rejected") not in await feed(bus)
    second, _ = await leader(bus, 2)
    assert list(second.matching.examples.ready) == ["a"]


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize("left", ["nothing", "the first half", "half an entry"])
async def test_a_new_leader_completes_the_feed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, left: str, with_snapshot: bool
) -> None:
    """The earlier leader died between an entry and its statuses, or within them, or the feed was lost."""
    monkeypatch.setattr(decision_feed, "MAX_STATUSES", 2)
    await leader(bus, 1)
    journal, names = Journal(bus, JOB), [f"f{number}" for number in range(12)]
    state = await journal.load()
    for start in range(0, 12, 3):
        events = decided_events(map(rejected, names[start : start + 3]))
        seq = await journal.append(events)
        fold(events, state)
        if start == 3 and with_snapshot:
            monkeypatch.setattr("penstock.services.coordinator.training.journal.SNAPSHOT_ENTRIES", 1)
            write = journal.snapshot(state)
            assert write is not None
            await write()
        some = {"nothing": 0, "the first half": 3, "half an entry": 2 if start == 3 else 3}[left]
        if start <= 3 and some:
            published = pack(StatusBatch(items=[rejected(name) for name in names[start : start + some]]), job=JOB)
            headers = {decision_feed.ENTRY_HEADER: str(seq if some == 3 else seq - 1)}
            await bus.publish(subjects.decisions(JOB), published, headers=headers)
    await leader(bus, 2)
    found = [name for name, _ in await feed(bus)]
    assert list(dict.fromkeys(found)) == names, "in the order of the ledger, without a gap"
    assert len(found) <= len(names) + 2, "only statuses of an unfinished entry are published twice"


async def test_a_full_feed_loses_nothing(bus: Bus) -> None:
    await bus.ensure_streams(experience_bytes=1 << 20, stream_bytes=1 << 20)
    await post_feedback(bus, *(posted(name, time.time()) for name in "abc"))
    supply, recorder = await leader(bus, 1)
    await recorder.record()
    other = subjects.decisions("job_y")
    with pytest.raises(StreamFull):
        while True:
            await bus.publish(other, b"x" * 100_000)
    with pytest.raises(StreamFull):
        while True:
            await bus.publish(other, b"x" * 100)
    for name in "ab":
        supply._note(supply.matching.reject([name], "feedback_full", time.time()))
        await recorder.record()
    assert supply._feed.is_behind
    assert ("a", "rejected") not in await feed(bus)
    await supply._free_stream_space()
    assert supply._feed.is_behind, "there is no room yet"
    await bus.purge(subjects.DECISIONS, other)
    await supply._free_stream_space()
    assert not supply._feed.is_behind
    supply._note(supply.matching.reject(["c"], "feedback_full", time.time()))
    await recorder.record()
    assert [name for name, status in await feed(bus) if status == "rejected"][-3:] == ["a", "b", "c"]


async def test_a_ledger_without_live_decisions_goes_on(bus: Bus) -> None:
    """Ledgers of earlier versions contain only admissions, and their feeds name no entry: no status is repeated."""
    drawn = Drawn(writer_epoch=1, time=0.0, start=0, stop=1, min_version=0, deadline=9.0)
    await leader(bus, 1)
    await bus.publish(subjects.ledger(JOB), encode_events([drawn]))
    before = pack(StatusBatch(items=[rejected("old")]), job=JOB, epoch=1)
    await bus.publish(subjects.decisions(JOB), before)
    await record_decided(bus, JOB, rejected("new"))
    await leader(bus, 2)
    assert await feed(bus) == [("new", "rejected")]
