"""Recovered decisions: items rejected for lack of room stay rejected for the next leader."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.online import matching as matching_module
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.quarantine import Quarantine
from penstock.services.coordinator.online.statuses import RecoveredDecisions, feedback_status
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.interaction import Feedback, FeedbackStatus, Interaction, InteractionStatus

NOW = 1000.0
EPISODE = "0192f0c1-0000-7000-8000-00000000000e"


def job(**online: Any) -> OnlineJob:
    spec = {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "online": {"metrics": {"rating": {"type": "float"}}, **online},
    }  # fmt: skip
    return OnlineJob.parse(spec)


def served(name: str, *, episode: str = EPISODE, alone: bool = True) -> Interaction:
    return Interaction(
        id=name, request=name, index=0, job="j", episode=episode, alone=alone, key_id="asker", user="u", split="train",
        untrainable="", prompt_ids=[7], token_ids=[1], logprobs=[-0.5], spans=[Span(0, 0, 1)],
        sampling=Sampling(max_new_tokens=4), finish="stop", template="t", body_digest="b", text="x", started=NOW,
        first_token=NOW, ended=NOW,
    )  # fmt: skip


def rating(name: str, about: str, **changes: Any) -> Feedback:
    fields: dict[str, Any] = {"inference": about, "value": 0.5, "received": NOW, "metric": "rating"} | changes
    return Feedback(id=name, job="j", kind=fields.pop("kind", "metric"), key_id="asker", **fields)


Facts = list[Interaction | Feedback]


def read(found: Matching, facts: Facts) -> list[FeedbackStatus]:
    """Read the facts of both streams, each with its sequence there."""
    fates: list[FeedbackStatus] = []
    for kind in (Interaction, Feedback):
        for seq, fact in enumerate((one for one in facts if isinstance(one, kind)), 1):
            if isinstance(fact, Interaction):
                fates += found.on_interaction(seq, fact)
            else:
                fates += found.on_feedback(seq, fact, NOW)
    return fates + found.sweep(version=0, now=NOW)


def test_items_rejected_for_a_full_stream_stay_rejected() -> None:
    facts: Facts = [served("i1"), rating("f1", "i1"), rating("f2", "i2")]
    leader = Matching(job())
    fates = read(leader, facts)
    fates += leader.reject(leader.undecided_feedback(9), "feedback_full", NOW)
    successor = Matching(job())
    successor.restore(LedgerState(), RecoveredDecisions.of(fates))
    assert read(successor, facts) == []
    assert (successor.ready, len(successor.unmatched)) == ({}, 0)
    assert read(successor, [served("i1"), rating("f3", "i1")]) != [], "other keys may still judge its answer"
    assert [[*one.feedback] for one in successor.ready["i1"]] == [["f3"]]


@pytest.mark.parametrize("alone", [True, False])
def test_an_episode_refused_for_overload_stays_refused(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    facts: Facts = [served("i1", alone=alone), rating("f1", "i1", final=True), rating("f2", "", episode=EPISODE)]
    leader = Matching(job(gamma=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(matching_module, "MAX_WAITING", 0)
        fates = read(leader, facts)
    assert {(one.feedback, one.reason) for one in fates if one.status == "rejected"} == {
        ("f1", "too_many_waiting"), ("f2", "too_many_waiting"),
    }  # fmt: skip
    successor = Matching(job(gamma=1.0))
    successor.restore(LedgerState(), RecoveredDecisions.of(fates, leader.refused_interactions.drain()))
    assert read(successor, facts) == []
    assert (successor.num_waiting, successor.ready) == (0, {})
    late = successor.on_feedback(9, rating("f9", "", episode=EPISODE), NOW)
    assert [(one.status, one.reason) for one in late] == [("rejected", "too_many_waiting")]
    if not alone:
        successor.on_interaction(9, served("i9", alone=False))
        assert [one.reason for one in successor.refused_interactions.drain()] == ["episode_over"]


def test_the_last_status_of_an_item_and_the_first_of_an_answer_count() -> None:
    fates = [
        feedback_status("again", "rejected", "quarantine_full", 1.0), feedback_status("again", "matched", "", 2.0),
        feedback_status("dropped", "rejected", "lost", 2.0, ordinal=3),
        feedback_status("taken-back", "retracted", "by r", 2.0),
        feedback_status("nowhere", "expired", "unknown_target", 2.0),
        feedback_status("held", "rejected", "quarantine_full", 5.0),
        feedback_status("waits", "matched", "", 2.0), feedback_status("r2", "retracted", "retracts never", 2.0),
    ]  # fmt: skip
    refused = [
        InteractionStatus(interaction=name, status="rejected", reason=reason, time=1.0)
        for name, reason in (
            ("i1", "stale"),
            ("i1", "later"),
            ("cut", "client_disconnected"),
            ("whole", "client_disconnected"),
            ("whole", "too_many_waiting"),
        )
    ]
    fates += [
        FeedbackStatus(feedback="learnt", status="trained", time=1.0),
        FeedbackStatus(
            feedback="learnt", status="rejected", reason="too_late", revision=2, time=2.0
        ),  # the status concerns its revision alone
        FeedbackStatus(feedback="long-ago", status="rejected", reason="too_late", revision=1, time=2.0),
    ]
    recovered = RecoveredDecisions.of(fates, refused)
    items = {
        "dropped": "admitted", "taken-back": "retracted", "r": "retracted", "nowhere": "expired", "learnt": "admitted",
        "long-ago": "admitted",
    }  # fmt: skip
    assert recovered == RecoveredDecisions([], items, {"i1": "stale", "whole": "too_many_waiting"}, {"held": 5.0})


@pytest.mark.parametrize("is_known", [True, False])
def test_a_late_revision_of_trained_feedback_is_late_for_every_leader(is_known: bool) -> None:
    """A checkpoint lies behind it and the mark has passed it, so the ledger does not name it any more."""
    item = rating("f1", "i1")
    fates = (
        [FeedbackStatus(feedback="f1", status="trained", ordinal=3, batch=1, version=1, time=NOW)] if is_known else []
    )
    fates.append(feedback_status("f1", "rejected", "too_late", NOW, revision=1))
    successor = Matching(job())
    successor.restore(LedgerState(), RecoveredDecisions.of(fates))
    assert read(successor, [served("i1"), rating("f1", "i1", revision=1)]) == []
    assert not any(one.feedback for found in successor.ready.values() for one in found)
    retraction = rating("r1", "", kind="retraction", body={"feedback": item.id}, metric="", value=None)
    assert [one.reason for one in successor.on_feedback(9, retraction, NOW)] == ["late_after_training"]


def test_a_retracted_item_and_its_retraction_stay_retracted() -> None:
    retraction = rating("r1", "", kind="retraction", body={"feedback": "f1"}, metric="", value=None)
    fates = read(Matching(job()), [rating("f1", "i1"), retraction])
    assert {one.feedback: one.status for one in fates} == {"f1": "retracted", "r1": "retracted"}
    successor = Matching(job())
    successor.restore(LedgerState(), RecoveredDecisions.of(fates))
    assert read(successor, [rating("f1", "i1", revision=1), retraction]) == []
    assert len(successor.unmatched) == 0


def test_a_revision_of_an_item_that_quarantine_rejected_counts() -> None:
    passed: list[int] = []

    def take(seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        passed.append(seq)
        return []

    item = rating("0192f0c1-0000-7000-8000-000000000001", "i1", received=4.0)
    found = Quarantine(job(quarantine={}), take)
    state = LedgerState(quarantined={item.id: 1})
    found.restore(state, RecoveredDecisions(rejected_by_quarantine={item.id: 5.0}))
    assert found.on_feedback(1, item, NOW) == []
    assert (found.num_held, passed) == (0, [])
    found.on_feedback(2, rating(item.id, "i1", received=6.0, revision=1), NOW)
    assert passed == [2]


def test_a_retraction_without_an_item_expires() -> None:
    found, wait = Matching(job()), job().online.match_ttl_s
    retraction = rating("r1", "", kind="retraction", body={"feedback": "never"}, metric="", value=None)
    assert [(one.feedback, one.status) for one in found.on_feedback(3, retraction, NOW)] == [("r1", "retracted")]
    found.on_feedback(8, rating("f8", "i8", received=NOW + wait), NOW + wait)
    assert found.sweep(version=0, now=NOW + wait) == []
    assert found.low_water()[1] == 3
    fates = found.sweep(version=0, now=NOW + wait + 1)
    assert [(one.feedback, one.status, one.reason) for one in fates] == [("r1", "expired", "unknown_target")]
    assert found.low_water()[1] == 8
    successor = Matching(job())
    successor.restore(LedgerState(), RecoveredDecisions.of(fates))
    assert successor.on_feedback(3, retraction, NOW + wait + 1) == []
    assert successor.low_water()[1] == 3, "read up to there"
    successor.on_feedback(8, rating("f8", "i8"), NOW)
    assert successor.low_water()[1] == 8
