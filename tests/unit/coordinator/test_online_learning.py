"""Rows of the admission table, feedback in any order, credit across turns, shares of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online.admission import admit
from penstock.services.coordinator.online.credit import returns
from penstock.services.coordinator.online.decision_feed import DECIDED, Funnel
from penstock.services.coordinator.online.fairness import weight_of
from penstock.services.coordinator.online.groups import group_of
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import within_shares
from penstock.services.coordinator.online.statuses import interaction_statuses, refused_statuses
from penstock.services.coordinator.queries.samples import sample_rows
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.events import Admission, Admitted
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Erasure, Feedback, FeedbackStatus, Interaction
from penstock.shared.protocol.trajectory import decode_group, encode_group

NOW = 1000.0
EPISODE = "0192f0c1-0000-7000-8000-00000000000e"
ACCEPTED = {"accepted": {"type": "boolean"}}
RATED = {"rating": {"type": "float"}}
SOLVED = {"solved": {"type": "boolean", "level": "episode"}}


def job(**online: Any) -> OnlineJob:
    spec = {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "data": {"prompt": {"max_tokens": 16}}, "sampling": {"max_new_tokens": 4},
        "train": {"batch_size": 4}, "online": {"metrics": RATED, **online},
    }  # fmt: skip
    config = parse_job(spec)
    assert isinstance(config, OnlineJob)
    return config


def interaction(name: str = "i1", *, version: int = 5, at: float = NOW, **changes: Any) -> Interaction:
    tokens = changes.pop("token_ids", [1, 2])
    fields: dict[str, Any] = {
        "id": name, "request": name, "index": 0, "job": "j", "episode": f"e-{name}", "alone": True, "key_id": "asker",
        "user": "u", "split": "train", "untrainable": "", "prompt_ids": [7, 8], "token_ids": tokens,
        "logprobs": [-0.5] * len(tokens), "spans": [Span(version, 0, len(tokens))] if tokens else [],
        "sampling": Sampling(max_new_tokens=4), "finish": "stop", "template": "t", "body_digest": "b", "text": "x",
        "started": at - 1, "first_token": at, "ended": at,
    }  # fmt: skip
    return Interaction(**fields | changes)


def rating(name: str = "f1", value: Any = 0.5, **changes: Any) -> Feedback:
    fields: dict[str, Any] = {"id": name, "job": "j", "kind": "metric", "key_id": "k1", "received": NOW + 1}
    if "episode" not in changes:
        fields["inference"] = "i1"
    return Feedback(**fields | {"metric": "rating", "value": value} | changes)


def table(**changes: Any) -> tuple[str, str, float]:
    """Return verdict, reason and reward of one interaction."""
    arguments: dict[str, Any] = {"interaction": interaction(), "items": [rating()], "job": job(), "version": 5}
    arguments |= changes
    found = admit(arguments.pop("interaction"), arguments.pop("items"), arguments.pop("job"), now=NOW + 2, **arguments)
    return found.verdict, found.reason, found.reward


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [5, 6])
def test_row_1_an_answer_within_the_lag_bound_is_trained(version: int) -> None:
    assert table(version=version) == ("train", "feedback", 0.5)


def test_row_1_the_oldest_token_counts() -> None:
    spans = [Span(4, 0, 1), Span(5, 1, 2)]
    assert table(interaction=interaction(spans=spans), version=5)[0] == "train"
    assert table(interaction=interaction(spans=spans), version=6) == ("reject", "stale", 0.5)


def test_row_1_tokens_newer_than_the_next_update_wait_for_the_clock() -> None:
    assert table(version=4)[:2] == ("wait", "newer_than_the_clock")


def test_row_2_beyond_the_window_is_rejected_as_stale() -> None:
    assert table(version=7) == ("reject", "stale", 0.5)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"token_ids": [1], "logprobs": [-1.0], "policy_version": 5}, "source_not_trusted"),  # row 3
        ({"token_ids": [1], "policy_version": 5}, "source_not_trusted"),  # row 4
        ({"token_ids": [1]}, "source_not_trusted"),  # row 5
        ({"messages": []}, "text_only"),  # row 6
    ],
)
def test_rows_3_to_6_posted_interactions_are_refused_unless_the_job_asks_for_them(
    body: dict[str, Any], reason: str
) -> None:
    matching = Matching(job())
    matching.on_feedback(1, rating(kind="interaction", body={"prompt_token_ids": [1]} | body), NOW)
    statuses = matching.sweep(version=5, now=NOW)
    assert [(one.status, one.reason) for one in statuses] == [("rejected", reason)]


def test_row_7_the_newest_item_of_each_source_counts_then_their_mean() -> None:
    items = [rating("a", 1.0), rating("b", -1.0, received=NOW + 3), rating("c", 0.5, key_id="k2")]
    assert table(items=items) == ("train", "feedback", -0.25)
    assert table(items=[*items[:2], rating("c", 0.5, key_id="k2", weight=3.0)])[2] == pytest.approx(0.125)


def test_row_8_feedback_after_its_interaction_was_taken_is_late() -> None:
    matching, _ = settled([interaction()], [rating()])
    take(matching)
    statuses = matching.on_feedback(9, rating("f2", 1.0), NOW + 9)
    assert [(one.status, one.reason) for one in statuses] == [("rejected", "late_after_training")]


def test_row_9_a_missing_metric_counts_as_its_default_after_a_time_or_at_the_end() -> None:
    timed = job(metrics={"rating": {"type": "float", "default_after_s": 10.0, "default_value": -0.5}})
    assert table(job=timed, items=[])[0] == "wait"
    assert table(job=timed, items=[], interaction=interaction(at=NOW - 9)) == ("train", "default", -0.5)
    assert table(items=[], closed=True) == ("reject", "no_feedback", 0.0)
    two = job(metrics=RATED | {"other": {"type": "float", "default_value": 0.25}})
    assert table(job=two)[0] == "wait"
    assert table(job=two, closed=True) == ("train", "feedback", 0.75)


def test_row_10_a_broken_tool_call_is_never_free() -> None:
    broken = interaction(tool_calls_valid=False)
    assert table(interaction=broken, items=[]) == ("train", "invalid", -1.0)
    assert table(interaction=broken, items=[rating(value=1.0)]) == ("train", "invalid", -1.0)
    assert table(interaction=broken, job=job(invalid_reward=-0.3)) == ("train", "invalid", -0.3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"untrainable": "opted_out"}, "opted_out"), ({"split": "val"}, "split_val")],
)
def test_row_11_marked_answers_are_not_trained(changes: dict[str, Any], reason: str) -> None:
    assert table(interaction=interaction(**changes))[:2] == ("reject", reason)


def test_row_11_users_who_opted_out_are_not_trained_on() -> None:
    matching = Matching(job(), opted_out=lambda user: user == "u")
    matching.on_interaction(1, interaction())
    matching.on_feedback(1, rating(), NOW)
    assert [(f.status, f.reason) for f in matching.sweep(version=5, now=NOW)] == [("rejected", "opted_out")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": [1] * 17}, "prompt_too_long"),
        ({"token_ids": [1] * 5}, "completion_too_long"),
        ({"token_ids": []}, "no_tokens"),
        ({"logprobs": [-1.0, float("nan")]}, "not_finite"),
        ({"logprobs": [-1.0, 0.5]}, "not_finite"),
        ({"logprobs": [-1.0]}, "lengths_differ"),
        ({"spans": [Span(5, 0, 1)]}, "lengths_differ"),
        ({"sampling": Sampling(max_new_tokens=4, temperature=0.0)}, "other_temperature"),
    ],
)
def test_row_12_an_answer_that_cannot_be_scored_is_rejected(changes: dict[str, Any], reason: str) -> None:
    assert table(interaction=interaction(**changes))[:2] == ("reject", reason)


@pytest.mark.parametrize("value", [float("inf"), 11.0, -11.0])
def test_row_12_a_reward_far_out_of_range_is_an_error(value: float) -> None:
    statuses = Matching(job()).on_feedback(1, rating(value=value), NOW)
    assert [(one.status, one.reason) for one in statuses] == [("rejected", "out_of_range")]


def test_a_reward_is_mapped_weighted_clipped_and_summed() -> None:
    two = job(metrics={"accepted": {"type": "boolean", "when_false": -0.5}, "rating": {"type": "float", "weight": 0.1}})
    items = [rating("a", False, metric="accepted"), rating("b", 5.0)]
    assert table(job=two, items=items)[2] == pytest.approx(0.0)
    assert table(job=two, items=[items[0], rating("b", 50.0)])[2] == pytest.approx(0.5)


# -- matching ---------------------------------------------------------------------------------------------------------


def settled(
    interactions: list[Interaction], items: list[Feedback], **online: Any
) -> tuple[Matching, list[FeedbackStatus]]:
    matching = Matching(job(**online))
    statuses = [one for seq, item in enumerate(items, 1) for one in matching.on_feedback(seq, item, NOW)]
    statuses += [one for seq, record in enumerate(interactions, 1) for one in matching.on_interaction(seq, record)]
    return matching, statuses + matching.sweep(version=5, now=NOW + 2)


def take(matching: Matching) -> list[Admission]:
    ready = [trajectory for found in matching.ready.values() for trajectory in found]
    admissions = [
        Admission(
            n, {t.interaction.id: t.seq for t in one.turns}, {name: item.seq for name, item in one.feedback.items()},
            one.reward, 0, one.key_id, one.user, one.reason, NOW,
        )
        for n, one in enumerate(ready)
    ]  # fmt: skip
    matching.on_admitted(admissions)
    return admissions


def test_early_feedback_waits_and_expires_with_its_time() -> None:
    matching = Matching(job(match_ttl_s=60.0))
    assert matching.on_feedback(1, rating(), NOW) == []
    assert matching.sweep(version=5, now=NOW + 30) == []
    assert [f.status for f in matching.on_interaction(1, interaction())] == ["matched"]
    matching.on_feedback(2, rating("f2", inference="nobody"), NOW)
    statuses = [one for t in (30.0, 62.0) for one in matching.sweep(version=5, now=NOW + t)]
    assert [(f.feedback, f.status, f.reason) for f in statuses] == [("f2", "expired", "unknown_target")]


def test_a_duplicate_changes_nothing_and_a_higher_revision_replaces() -> None:
    matching, _ = settled([interaction()], [rating()])
    assert matching.on_feedback(2, rating(value=-1.0), NOW) == []
    assert matching.ready["i1"][0].reward == 0.5
    matching.on_feedback(3, rating(value=-1.0, revision=1), NOW)
    assert not matching.ready, "settled again before it is admitted"
    matching.sweep(version=5, now=NOW + 2)
    assert matching.ready["i1"][0].reward == -1.0
    assert take(matching)[0].feedback == {"f1": 3}
    heir = Matching(job())
    heir.restore(LedgerState(used={"f1": 3}))
    for leader in (matching, heir):
        for seq in (2, 3):
            assert leader.on_feedback(seq, rating(value=-1.0, revision=seq - 2), NOW) == [], "the revision that counted"
        (late,) = leader.on_feedback(4, rating(value=1.0, revision=2), NOW)
        assert (late.feedback, late.status, late.reason, late.revision) == ("f1", "rejected", "too_late", 2)


def test_retraction_before_and_after_it_counted() -> None:
    retract = rating("r1", kind="retraction", inference="", body={"feedback": "f1"})
    matching, statuses = settled([interaction()], [rating(), retract])
    assert [(f.feedback, f.status) for f in statuses] == [("f1", "retracted"), ("r1", "retracted")]
    assert not matching.ready
    matching, _ = settled([interaction()], [rating()])
    take(matching)
    again = matching.on_feedback(2, retract, NOW)
    assert [(f.feedback, f.status, f.reason) for f in again] == [("r1", "rejected", "late_after_training")]


def test_a_retraction_may_overtake_its_item() -> None:
    matching = Matching(job())
    matching.on_feedback(1, rating("r1", kind="retraction", inference="", body={"feedback": "f1"}), NOW)
    matching.on_interaction(1, interaction())
    assert matching.low_water()[1] == 1, "a new leader must know of it, too"
    assert [(f.feedback, f.status) for f in matching.on_feedback(2, rating(), NOW)] == [("f1", "retracted")]
    assert matching.sweep(version=5, now=NOW) == []
    assert not matching.ready


def test_deleted_data_is_forgotten() -> None:
    matching, _ = settled([interaction()], [rating()])
    assert matching.on_erasure(Erasure(user="u", interactions=["i1"], feedback=["f1"], time=NOW), NOW) == []
    assert matching.sweep(version=5, now=NOW) == []
    assert not matching.ready
    assert not matching.num_waiting


def test_an_episode_without_turns_after_a_deletion_is_closed() -> None:
    matching, _ = settled(
        turns(), [rating("f1", 0.5, inference="i2"), rating("whole", 1.0, episode=EPISODE, key_id="k2")]
    )
    assert matching.on_erasure(Erasure(user="u", interactions=["i2"], feedback=[], time=NOW), NOW + 7) == [
        FeedbackStatus(feedback="f1", status="rejected", reason="erased", time=NOW + 7)
    ], "feedback of other keys has a status, too"
    assert list(matching.episodes) == [EPISODE]
    (one,) = matching.on_erasure(Erasure(user="u", interactions=["i1"], feedback=[], time=NOW), NOW + 8)
    assert (one.feedback, one.status, one.reason) == ("whole", "rejected", "erased")
    assert not matching.episodes
    assert matching.low_water() == (3, 2), "nothing is undecided"
    assert matching.sweep(version=6, now=NOW + 9) == []
    late = matching.on_feedback(9, rating("f9", 1.0, episode=EPISODE), NOW + 9)
    assert [(one.status, one.reason) for one in late] == [("rejected", "erased")]


def test_ready_episodes_are_settled_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    matching, _ = settled([interaction()], [rating()])
    ready = matching.ready["i1"]
    matching.sweep(version=5, now=NOW + 3)
    matching.sweep(version=5, now=NOW + 4)
    assert matching.ready["i1"] is ready
    monkeypatch.setattr(matching, "_opted_out", lambda user: True)
    assert [one.reason for one in matching.sweep(version=5, now=NOW + 5)] == ["opted_out"]
    matching, _ = settled([interaction()], [rating()])
    matching.sweep(version=6, now=NOW + 3, everything=False)
    assert [one.reason for one in matching.sweep(version=7, now=NOW + 4)] == ["stale"]


def test_a_judge_of_a_later_turn_is_a_judge_of_the_earlier_ones() -> None:
    matching, _ = settled(turns(rendered_anew=True), [rating("f1", 0.5, inference="i2", key_id="hostile", final=True)])
    matching.sweep(version=6, now=NOW + 6)
    assert [one.owners for one in matching.ready[EPISODE]] == [(("hostile",), ("asker",), ("u",))] * 2
    matching, _ = settled([interaction()], [rating("a"), rating("b", key_id="hostile"), rating("c", key_id="k2")])
    assert matching.ready["i1"][0].judges == ("hostile", "k1", "k2"), "not only the newest judge"
    timed = {"rating": {"type": "float", "default_after_s": 1.0}}
    matching, _ = settled([interaction()], [], metrics=timed)
    assert matching.ready["i1"][0].owners.judges == ("asker",), "the missing feedback of the asking key decided"


def test_everything_below_the_low_water_marks_is_decided() -> None:
    matching, _ = settled([interaction(), interaction("i2")], [rating(), rating("f2", inference="i2", episode="")])
    assert matching.low_water() == (1, 1)
    assert matching.low_water(without=["i1"]) == (2, 2)
    take(matching)
    assert matching.low_water() == (3, 2), "a message of feedback may hold more items"


def test_a_finished_job_leaves_no_item_without_a_final_status() -> None:
    matching = Matching(job())
    matching.on_feedback(1, rating("f9", inference="nobody"), NOW)
    assert [(f.feedback, f.reason) for f in matching.on_job_end(NOW)] == [("f9", "job_ended")]


# -- turns ------------------------------------------------------------------------------------------------------------


def turns(*, rendered_anew: bool = False) -> list[Interaction]:
    first = interaction("i1", episode=EPISODE, alone=False)
    prompt = [9, 9, 9] if rendered_anew else [7, 8, 1, 2, 30, 31]
    return [
        first,
        interaction("i2", at=NOW + 5, episode=EPISODE, alone=False, prompt_ids=prompt, token_ids=[3], version=6),
    ]


@pytest.mark.parametrize(
    ("record", "items", "reason"),
    [
        (interaction(version=0), [], "stale"),
        (interaction(version=0), [rating()], "stale"),
        (interaction(at=NOW - 1800.0, alone=False, episode=EPISODE), [], "no_feedback"),
        (interaction(untrainable="opted_out"), [], "opted_out"),
        (interaction(untrainable="constrained"), [rating()], "constrained"),
        (interaction(split="val"), [rating()], "split_val"),
    ],
)
def test_a_refused_interaction_has_a_reason(record: Interaction, items: list[Feedback], reason: str) -> None:
    matching, _ = settled([record], items)
    (found,) = matching.refused_interactions.drain()
    assert (found.interaction, found.status, found.reason) == (record.id, "rejected", reason)
    assert matching.refused_interactions.drain() == []


def test_an_admission_names_the_refused_turns_of_its_episode() -> None:
    """A new leader learns the refused turns from the ledger alone."""
    first, second = turns()
    matching, _ = settled([first, replace(second, untrainable="train_false")], [rating("f1", 0.5, inference="i2")])
    matching.on_feedback(2, rating("end", None, episode=EPISODE, metric="", final=True), NOW)
    matching.sweep(version=6, now=NOW + 6)
    (trajectory,) = matching.ready[EPISODE]
    assert trajectory.refused == {"i2": "train_false"}
    assert matching.refused_interactions.drain() == [], "not before it is admitted"
    admission = Admission(
        0, {"i1": 1}, {"f1": 1, "end": 2}, 0.5, 0, "k1", "u", "credit", NOW, refused=trajectory.refused
    )  # fmt: skip
    event = Admitted(writer_epoch=1, time=NOW, admissions=[admission], low_interactions=3, low_feedback=3)
    state = LedgerState(admissions={0: admission})
    statuses = interaction_statuses([event], state)
    assert {one.interaction: (one.status, one.reason) for one in statuses} == {
        "i1": ("admitted", "credit"), "i2": ("rejected", "train_false"),
    }  # fmt: skip
    successor = Matching(job())
    successor.restore(state)
    assert successor.on_interaction(2, replace(second, untrainable="train_false")) == []
    assert successor.num_waiting == 0
    matching.on_admitted([admission])
    for one in (matching, successor):
        (late,) = one.on_feedback(9, rating("late", inference="i2"), NOW)
        assert (late.status, late.reason) == ("rejected", "train_false")


def test_waiting_interactions_are_refused_when_the_job_ends() -> None:
    matching, _ = settled([interaction()], [])
    matching.on_job_end(NOW)
    assert [one.reason for one in matching.refused_interactions.drain()] == ["job_ended"]


def test_reasons_are_counted_and_only_known_ones_are_labels() -> None:
    funnel = Funnel(job())
    counter = DECIDED.labels("rejected", "other")
    before = counter._value.get()
    funnel.on_interaction_statuses(refused_statuses({"i1": "stale", "i2": "stale", "i3": "made up by a worker"}, NOW))
    row = funnel.row()
    assert (row["online/refused"], row["online/refused/stale"]) == (3.0, 2.0)
    assert counter._value.get() == before + 1


def test_feedback_on_a_refused_turn_has_the_reason_of_that_turn() -> None:
    first, second = turns()
    matching, _ = settled(
        [first, replace(second, untrainable="side_turn")], [rating("f1"), rating("f2", inference="i2")]
    )
    matching.on_feedback(3, rating("end", None, episode=EPISODE, metric="", final=True), NOW)
    statuses = matching.sweep(version=9, now=NOW + 6)
    expected = {"i1": "stale", "i2": "side_turn"}
    assert {one.interaction: one.reason for one in matching.refused_interactions.drain()} == expected
    assert {one.feedback: one.reason for one in statuses} == {"f1": "stale", "f2": "side_turn", "end": "side_turn"}
    for seq, (name, reason) in enumerate(expected.items(), 4):
        late = matching.on_feedback(seq, rating(f"late-{name}", inference=name), NOW)
        assert [(one.status, one.reason) for one in late] == [("rejected", reason)]


def test_row_9_an_unfinished_episode_is_masked_and_its_reward_kept() -> None:
    idle = NOW + 5 + 1800.0
    for mode, end, expected in (
        ("mask", None, ("unfinished", 0.0)),
        ("mask", True, ("feedback", 1.0)),
        ("judge", None, ("feedback", 1.0)),
    ):
        matching, _ = settled(turns(), [rating("f1", 0.5, inference="i2")], unfinished=mode)
        if end:
            matching.on_feedback(2, rating("end", None, episode=EPISODE, metric="", final=True), NOW)
        matching.sweep(version=6, now=idle)
        (trajectory,) = matching.ready[EPISODE]
        assert trajectory.reward == 0.5, "the baseline counts it"
        weight = weight_of(job(), {}, trajectory.judges, trajectory.reason)
        assert (trajectory.reason, weight) == expected


def test_row_10_a_truncated_answer_is_masked_if_the_job_says_so() -> None:
    cut = interaction(finish="length")
    assert table(interaction=cut, job=job(truncated="mask")) == ("train", "truncated", 0.5)
    assert table(interaction=cut, job=job()) == ("train", "feedback", 0.5)
    assert table(interaction=cut, items=[], job=job(truncated="mask"))[0] == "wait", "there is no reward to keep yet"
    broken = interaction(finish="length", tool_calls_valid=False)
    assert table(interaction=broken, job=job(truncated="mask")) == ("train", "truncated", -1.0)
    first, second = turns()
    matching, _ = settled(
        [replace(first, finish="length"), second], [rating("f1", 0.5, inference="i2")], truncated="mask"
    )
    matching.on_feedback(2, rating("end", None, episode=EPISODE, metric="", final=True), NOW)
    matching.sweep(version=6, now=NOW + 6)
    found = [([t.interaction.id for t in one.turns], one.reason) for one in matching.ready[EPISODE]]
    assert found == [(["i1"], "truncated"), (["i2"], "feedback")], "the rest of the episode is trained"


def test_returns_accumulate_backwards() -> None:
    assert returns([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]


def test_an_episode_waits_for_its_end_and_is_one_trajectory() -> None:
    matching, _ = settled(turns(), [rating("f1", 0.5, inference="i2")])
    assert not matching.ready, "more turns may follow"
    matching.on_feedback(2, rating("end", None, episode=EPISODE, metric="", final=True), NOW)
    matching.sweep(version=6, now=NOW + 6)
    (trajectory,) = matching.ready[EPISODE]
    assert ([t.interaction.id for t in trajectory.turns], trajectory.reward) == (["i1", "i2"], 0.5)
    assert set(trajectory.feedback) == {"f1", "end"}


def test_a_changed_prompt_or_return_begins_a_trajectory() -> None:
    end = rating("f1", 0.5, inference="i2", final=True)
    matching, _ = settled(turns(rendered_anew=True), [end])
    matching.sweep(version=6, now=NOW + 6)
    assert [len(t.turns) for t in matching.ready[EPISODE]] == [1, 1]
    assert [t.reason for t in matching.ready[EPISODE]] == ["credit", "feedback"]
    matching, _ = settled(turns(), [rating("f0", 0.25), end])
    matching.sweep(version=6, now=NOW + 6)
    assert [(len(t.turns), t.reward) for t in matching.ready[EPISODE]] == [(1, 0.75), (1, 0.5)]


def test_an_episode_metric_judges_the_whole_and_ends_it() -> None:
    item = rating("f1", True, episode=EPISODE, metric="solved")
    matching, _ = settled(turns(), [item], metrics=SOLVED, gamma=0.5)
    matching.sweep(version=6, now=NOW + 6)
    assert [t.reward for t in matching.ready[EPISODE]] == [0.5, 1.0]


def test_an_idle_episode_closes() -> None:
    matching, _ = settled(turns(), [rating("f1", 0.5)], idle_ttl_s=60.0)
    matching.sweep(version=6, now=NOW + 64)
    assert not matching.ready
    matching.sweep(version=6, now=NOW + 66)
    assert [t.reward for t in matching.ready[EPISODE]] == [0.5, 0.0]


def test_a_turn_after_the_end_is_refused() -> None:
    matching, _ = settled(turns(), [rating("f1", 0.5, inference="i2", final=True)])
    matching.sweep(version=6, now=NOW + 6)
    take(matching)
    matching.on_interaction(3, interaction("i3", episode=EPISODE, alone=False, at=NOW + 9))
    statuses = matching.on_feedback(4, rating("f3", 1.0, inference="i3"), NOW)
    assert [(f.status, f.reason) for f in statuses] == [("rejected", "episode_over")]


def test_without_credit_each_turn_counts_alone() -> None:
    matching, _ = settled(turns(), [rating("f1", 0.5)], gamma=0.0)
    assert list(matching.ready) == ["i1"]


def test_an_episode_is_one_trajectory_with_its_context_masked() -> None:
    group = group_of("j", Draw(3), turns(), reward=0.5, epoch=1)
    assert group.prompt_ids.tolist() == [7, 8]
    assert group.token_ids.tolist() == [1, 2, 30, 31, 3]
    assert group.mask.tolist() == [1, 1, 0, 0, 1]
    assert group.spans.tolist() == [[0, 5, 0, 2], [0, 6, 2, 4], [0, 6, 4, 5]]
    data, header = encode_group(group)
    assert np.array_equal(decode_group(data).logprobs, np.float32([-0.5, -0.5, 0, 0, -0.5]))
    assert (header.min_version, header.max_version, header.rewards) == (5, 6, [0.5])


def test_a_transcript_has_everything_after_the_prompt() -> None:
    first, second = (replace(turn, text=f"answer {n}") for n, turn in enumerate(turns()))
    (row,) = sample_rows(1, [group_of("j", Draw(3), [replace(first, prompt="ask: ")], reward=0.5, epoch=1)])
    assert (row["prompt"], row["completion"]) == ("ask: ", "answer 0")
    stored = [replace(first, prompt="ask: "), replace(second, prompt="ask: answer 0 and then? ")]
    for group in (
        group_of("j", Draw(3), stored, reward=0.5, epoch=1),
        group_of("j", Draw(3), stored, reward=0.5, epoch=1),
    ):
        (row,) = sample_rows(1, [decode_group(encode_group(group)[0])])
        assert (row["prompt"], row["completion"]) == ("ask: ", "answer 0 and then? answer 1")
    (row,) = sample_rows(1, [group_of("j", Draw(3), [first, second], reward=0.5, epoch=1)])
    assert (row["prompt"], row["completion"]) == ("", "answer 1"), "records of earlier versions have no prompt"


def test_turns_of_two_temperatures_are_two_trajectories() -> None:
    first, second = turns()
    second = replace(second, sampling=replace(second.sampling, temperature=0.5))
    matching, _ = settled([first, second], [rating("f1", 0.5, inference="i2", final=True)])
    matching.sweep(version=6, now=NOW + 6)
    assert [len(trajectory.turns) for trajectory in matching.ready[EPISODE]] == [1, 1]
    own = group_of("j", Draw(1), [second], reward=0.5, epoch=1)
    imitated = group_of("j", Draw(1), [second], reward=0.5, epoch=1, objective="supervised", temperature=0.8)
    assert (own.temperature, imitated.temperature) == (0.5, 0.8)
    assert encode_group(own)[1].temperature == decode_group(encode_group(own)[0]).temperature == 0.5


# -- batches ----------------------------------------------------------------------------------------------------------


def shares(owners: list[tuple[str, str]], size: int = 4, **online: Any) -> list[int]:
    admissions = {
        n: Admission(n, {f"i{n}": n}, {}, 0.0, 0, key, user, "feedback", NOW) for n, (key, user) in enumerate(owners)
    }
    draws = [Draw(n) for n in admissions]
    return [draw.ordinal for draw in within_shares(job(**online), draws, admissions, size)]


def test_no_owner_exceeds_its_share_of_a_batch() -> None:
    hostile = [("bad", "b")] * 6
    assert shares([*hostile, ("a", "1"), ("b", "2"), ("c", "3")], max_share_per_key=0.25) == [0, 6, 7, 8]
    assert shares(hostile, max_share_per_key=0.5) == [], "a smaller batch would hold no other owner"
    assert shares([*hostile, ("a", "1")], max_share_per_key=0.5) == [0, 6]
    assert shares([("a", "1"), ("b", "1"), ("c", "2")], max_share_per_user=0.5) == [0, 2]
    assert shares(hostile) == [0, 1, 2, 3]


# -- the job file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"algorithm": {"type": "grpo"}}, "needs several answers to the same prompt"),
        ({"algorithm": {"group_size": 4}}, "a live agent asks once"),
        ({"train": {"max_lag": 9}}, "less than or equal to 8"),
        ({"train": {"data_epochs": 1}}, "no training data"),
        ({"online": {"max_share_per_key": 0.01}}, "less than one trajectory"),
        ({"warm_start": {"steps": 3}}, "warm_start.data"),
        ({"data": {"eval": {"type": "addition"}}}, "reward.scorers"),
        ({"data": {"train": {"type": "addition"}}}, "at most 0 items"),
    ],
)
def test_a_job_that_cannot_learn_online_is_refused(section: dict[str, Any], text: str) -> None:
    spec = {"kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"}}
    parse_job(spec)
    with pytest.raises(ConfigError, match=text):
        parse_job(spec | section)
