"""Decisions in the ledger: items rejected for lack of room stay rejected for the next leader."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.coordinator.online import matching as matching_module
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.quarantine import Quarantine
from penstock.services.coordinator.online.statuses import (
    FinalStatuses,
    UnrecordedDecisions,
    feedback_status,
    feedback_statuses,
    interaction_statuses,
    quarantine_rejections,
)
from penstock.services.coordinator.training import decided
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    Drawn,
    EndedFeedback,
    PackedIds,
    decode_events,
    encode_events,
)
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import Feedback, FeedbackStatus, Interaction, InteractionStatus

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


Messages = list[Interaction | Feedback]


def ledger_of(statuses: list[FeedbackStatus], refused: list[InteractionStatus] | None = None) -> LedgerState:
    """Return the ledger state that records ``statuses`` and ``refused``, each in an entry of its own."""
    state = LedgerState()
    for one in statuses:
        unrecorded = UnrecordedDecisions()
        unrecorded.add([one])
        fold(unrecorded.drain(epoch=1, now=NOW, read_to=(9, 9)), state)
    for each in refused or []:
        unrecorded = UnrecordedDecisions()
        unrecorded.add_interactions([each])
        fold(unrecorded.drain(epoch=1, now=NOW, read_to=(9, 9)), state)
    return state


def read(found: Matching, messages: Messages) -> list[FeedbackStatus]:
    """Let ``found`` read ``messages``, each with its sequence in its stream, and sweep; return the statuses."""
    statuses: list[FeedbackStatus] = []
    for kind in (Interaction, Feedback):
        for seq, message in enumerate((one for one in messages if isinstance(one, kind)), 1):
            if isinstance(message, Interaction):
                statuses += found.on_interaction(seq, message)
            else:
                statuses += found.on_feedback(seq, message, NOW)
    return statuses + found.sweep(version=0, now=NOW)


def test_items_rejected_for_a_full_stream_stay_rejected() -> None:
    messages: Messages = [served("i1"), rating("f1", "i1"), rating("f2", "i2")]
    leader = Matching(job())
    statuses = read(leader, messages)
    statuses += leader.reject(leader.undecided_feedback(9), "feedback_full", NOW)
    successor = Matching(job())
    successor.restore(ledger_of(statuses))
    assert read(successor, messages) == []
    assert (successor.ready, len(successor.unmatched)) == ({}, 0)
    assert read(successor, [served("i1"), rating("f3", "i1")]) != [], "other keys may still judge its answer"
    assert [[*one.feedback] for one in successor.ready["i1"]] == [["f3"]]


@pytest.mark.parametrize("alone", [True, False])
def test_an_episode_refused_for_overload_stays_refused(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: Messages = [served("i1", alone=alone), rating("f1", "i1", final=True), rating("f2", "", episode=EPISODE)]
    leader = Matching(job(gamma=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(matching_module, "MAX_WAITING", 0)
        statuses = read(leader, messages)
    assert {(one.feedback, one.reason) for one in statuses if one.status == "rejected"} == {
        ("f1", "too_many_waiting"), ("f2", "too_many_waiting"),
    }  # fmt: skip
    successor = Matching(job(gamma=1.0))
    successor.restore(ledger_of(statuses, leader.refused_interactions.drain()))
    assert read(successor, messages) == []
    assert (successor.num_waiting, successor.ready) == (0, {})
    late = successor.on_feedback(9, rating("f9", "", episode=EPISODE), NOW)
    assert [(one.status, one.reason) for one in late] == [("rejected", "too_many_waiting")]
    if not alone:
        successor.on_interaction(9, served("i9", alone=False))
        assert [one.reason for one in successor.refused_interactions.drain()] == ["episode_over"]


def test_the_last_status_of_an_item_and_the_first_of_an_answer_count() -> None:
    again, held, taken, by, pending = (f"0192f0c1-0000-7000-8000-00000000000{n}" for n in range(1, 6))
    statuses = [
        feedback_status(again, "rejected", "quarantine_full", 1.0), feedback_status(again, "rejected", "stale", 2.0),
        feedback_status(taken, "retracted", f"by {by}", 2.0),
        feedback_status("nowhere", "expired", "unknown_target", 2.0),
        feedback_status(held, "rejected", "quarantine_full", 3.0),
        feedback_status(held, "rejected", "quarantine_full", 5.0),
        feedback_status(pending, "retracted", "retracts never", 2.0),
        feedback_status("taken-back", "retracted", "by r", 2.0),
        feedback_status("long-ago", "rejected", "too_late", 2.0, revision=1),
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
    state = ledger_of(statuses, refused)
    final = FinalStatuses()
    final.restore(state)
    items = {again: "rejected", taken: "retracted", by: "retracted", "nowhere": "expired", "taken-back": "retracted"}
    for name, how in (items | {"r": "retracted", "long-ago": "admitted"}).items():
        assert final.retraction_refusal(name) == ("late_after_training" if how == "admitted" else f"already_{how}")
    assert held not in final.feedback
    assert pending not in final.feedback
    assert quarantine_rejections(state) == {again: 1.0, held: 5.0}
    assert {name: final.targets.get(name) for name in ("i1", "cut", "whole")} == {
        "i1": "stale", "cut": None, "whole": "too_many_waiting",
    }  # fmt: skip


def test_the_feed_follows_from_the_entries() -> None:
    """A reader of the status feed derives from the ledger entries the statuses that the leader found."""
    ids = [f"0192f0c1-0000-7000-8000-00000000000{n}" for n in range(1, 7)]
    statuses = [
        feedback_status(ids[0], "rejected", "stale", NOW), feedback_status(ids[1], "expired", "unknown_target", NOW),
        feedback_status(ids[2], "retracted", f"by {ids[3]}", NOW),
        feedback_status(ids[3], "retracted", f"retracts {ids[2]}", NOW),
        feedback_status(ids[4], "rejected", "quarantine_dropped", 7.0),
        feedback_status(ids[5], "rejected", "too_late", NOW, revision=2),
        feedback_status("odd name", "retracted", "by another", NOW),
    ]  # fmt: skip
    refused = [InteractionStatus(interaction=ids[0], status="rejected", reason="no_tokens", time=NOW)]
    unrecorded = UnrecordedDecisions()
    unrecorded.add(statuses)
    unrecorded.add_interactions(refused)
    events = decode_events(encode_events(unrecorded.drain(epoch=1, now=NOW, read_to=(9, 9))))
    state = fold(events)
    by_item = sorted(feedback_statuses(events, state), key=lambda one: one.feedback)
    assert by_item == sorted(statuses, key=lambda one: one.feedback)
    assert interaction_statuses(events, state) == refused
    assert not unrecorded


@pytest.mark.parametrize("is_known", [True, False])
def test_a_late_revision_of_trained_feedback_is_late_for_every_leader(is_known: bool) -> None:
    """A checkpoint covers the trained feedback and the mark has passed it, so no admission names it any more."""
    item, state = rating("f1", "i1"), LedgerState()
    if is_known:
        drawn = Drawn(writer_epoch=1, time=NOW, start=0, stop=1, min_version=0, deadline=9.0)
        admission = Admission(0, {"i1": 1}, {"f1": 1}, 1.0, 0, "asker", "u", "feedback", NOW)
        marks = {"low_interactions": 2, "low_feedback": 2}
        fold([drawn, Admitted(writer_epoch=1, time=NOW, admissions=[admission], **marks)], state)
        state.admissions = {}
    else:
        state = ledger_of([feedback_status("f1", "rejected", "too_late", NOW, revision=1)])
    successor = Matching(job())
    successor.restore(state)
    assert read(successor, [served("i1"), rating("f1", "i1", revision=1)]) == []
    assert not any(one.feedback for found in successor.ready.values() for one in found)
    retraction = rating("r1", "", kind="retraction", body={"feedback": item.id}, metric="", value=None)
    assert [one.reason for one in successor.on_feedback(9, retraction, NOW)] == ["late_after_training"]


def test_a_retracted_item_and_its_retraction_stay_retracted() -> None:
    retraction = rating("r1", "", kind="retraction", body={"feedback": "f1"}, metric="", value=None)
    statuses = read(Matching(job()), [rating("f1", "i1"), retraction])
    assert {one.feedback: one.status for one in statuses} == {"f1": "retracted", "r1": "retracted"}
    successor = Matching(job())
    successor.restore(ledger_of(statuses))
    assert read(successor, [rating("f1", "i1", revision=1), retraction]) == []
    assert len(successor.unmatched) == 0


def test_a_revision_of_an_item_that_quarantine_rejected_counts() -> None:
    passed: list[int] = []

    def take(seq: int, item: Feedback, now: float) -> list[FeedbackStatus]:
        passed.append(seq)
        return []

    item = rating("0192f0c1-0000-7000-8000-000000000001", "i1", received=4.0)
    found = Quarantine(job(quarantine={}), take)
    state = ledger_of([feedback_status(item.id, "rejected", "quarantine_expired", 5.0)])
    state.quarantined = {item.id: 1}
    found.restore(state)
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
    statuses = found.sweep(version=0, now=NOW + wait + 1)
    assert [(one.feedback, one.status, one.reason) for one in statuses] == [("r1", "expired", "unknown_target")]
    assert found.low_water()[1] == 8
    successor = Matching(job())
    successor.restore(ledger_of(statuses))
    assert successor.on_feedback(3, retraction, NOW + wait + 1) == []
    assert successor.low_water()[1] == 3, "read up to there"
    successor.on_feedback(8, rating("f8", "i8"), NOW)
    assert successor.low_water()[1] == 8


def test_the_state_names_all_decisions_above_the_mark_and_the_newest_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decided, "MIN_KEPT", 30)
    monkeypatch.setattr(decided, "MAX_BLOCK", 16)
    ids = [f"0192f0c1-0000-7000-8000-{n:012d}" for n in range(300)]
    blocks: tuple[decided.DecidedBlock, ...] = ()
    for seq, name in enumerate(ids, 1):
        block = decided.DecidedBlock.of([EndedFeedback(PackedIds.of([name]), "rejected", "stale")], [], b"", (1, seq))
        blocks = decided.with_block(blocks, block, (1, 200))
    names = [*decided.final_ids(one for block in blocks for one in block.feedback)]
    assert names == ids[-len(names) :], "in order, without a gap"
    assert len(names) >= 101, "all above the mark"
    assert sum(block.count for block in blocks) == len(names) <= 101 + 30 + 16
    assert len(blocks) <= 30
    newest = ()
    for seq, name in enumerate(ids, 1):
        block = decided.DecidedBlock.of([EndedFeedback(PackedIds.of([name]), "rejected", "stale")], [], b"", (1, seq))
        newest = decided.with_block(newest, block, (1, 400))
    assert 30 <= sum(block.count for block in newest) <= 30 + 16
