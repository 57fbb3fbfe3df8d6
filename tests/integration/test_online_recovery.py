"""Decisions that the next leader of an online job recovers, on a real bus."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online import decision_feed
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.interaction import FateBatch, Feedback, FeedbackBatch, FeedbackStatus
from penstock.shared.transport.bus import Bus

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


async def publish_decision(bus: Bus, fate: FeedbackStatus, *, epoch: int) -> None:
    await bus.publish(subjects.decisions(JOB), pack(FateBatch(items=[fate]), job=JOB, epoch=epoch))


async def leader(bus: Bus, epoch: int) -> LiveSupply:
    found = LiveSupply(bus, JOB, CONFIG, epoch=epoch)
    await found.recover(LedgerState())
    return found


async def test_items_rejected_for_space_stay_rejected(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader reads DECISIONS back to the oldest message that it reads again, however many came after it."""
    monkeypatch.setattr(decision_feed, "MIN_MESSAGES", 2)
    await post_feedback(bus, posted("a", time.time()), posted("b", time.time()))
    first = await leader(bus, 1)
    assert list(first.matching.examples.ready) == ["a", "b"]
    first._unpublished += first.matching.reject(["a"], "feedback_full", time.time())
    await first.flush()
    for number in range(20):
        await publish_decision(
            bus, FeedbackStatus(feedback=f"x{number}", status="rejected", reason="stale", time=time.time()), epoch=1
        )
    second = await leader(bus, 2)
    assert list(second.matching.examples.ready) == ["b"]
    await post_feedback(bus, posted("a", time.time()))
    *_, message = await bus.read(subjects.FEEDBACK, subjects.feedback(JOB))
    await second._take_message(subjects.feedback(JOB), message)
    assert list(second.matching.examples.ready) == ["b"], "nor when it is read once more"


async def test_decisions_of_a_deposed_leader_do_not_count(bus: Bus) -> None:
    now = time.time()
    await post_feedback(bus, *(posted(name, now) for name in "abc"))
    await publish_decision(
        bus, FeedbackStatus(feedback="a", status="rejected", reason="feedback_full", time=now), epoch=1
    )
    await publish_decision(
        bus, FeedbackStatus(feedback="b", status="rejected", reason="feedback_full", time=now), epoch=2
    )
    await publish_decision(
        bus, FeedbackStatus(feedback="c", status="rejected", reason="feedback_full", time=now), epoch=1
    )
    third = await leader(bus, 3)
    assert list(third.matching.examples.ready) == ["c"]
    await third.flush()
    batches = [unpack(one.data, FateBatch) for one in await bus.read(subjects.DECISIONS, subjects.decisions(JOB))]
    newest = {fate.feedback: fate.status for batch, _ in batches for fate in batch.items}
    assert newest == {"a": "rejected", "b": "rejected", "c": "matched"}
