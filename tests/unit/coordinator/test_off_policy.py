"""Off-policy examples by rows of the admission table: stale answers, corrections, preferences, posted interactions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from penstock.services.coordinator.online.fairness import owners_of
from penstock.services.coordinator.online.groups import example_group
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import LiveSource, batch_of
from penstock.services.coordinator.online.statuses import feedback_statuses
from penstock.services.coordinator.queries.admission_audit import flaws_of_admission
from penstock.services.coordinator.training.decision import Draft
from penstock.services.coordinator.training.gate import Candidate, Verdict
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LOGPROBS_DIFFER, LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Drawn, Dropped
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Erasure, Feedback, Interaction
from penstock.shared.protocol.objective import Objective
from penstock.shared.protocol.trajectory import (
    GroupHeader,
    decode_group,
    encode_group,
    group_headers,
    parse_group_header,
)

NOW = 1000.0
BOTH = {"supervised": {"min_reward": 0.0}, "preference": {}}
TRUSTED = {"trusted_keys": ["k1"]}
TOKENS = {"prompt_token_ids": [7, 8], "token_ids": [1, 2], "reward": 0.5}
EXACT = TOKENS | {"logprobs": [-0.5, -0.25], "policy_version": 5}


def job(**online: Any) -> OnlineJob:
    spec = {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "data": {"prompt": {"max_tokens": 16}}, "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 4},
        "online": {"off_policy": BOTH, **online},
    }  # fmt: skip
    return OnlineJob.parse(spec)


def served(name: str, *, version: int = 5, **changes: Any) -> Interaction:
    fields: dict[str, Any] = {
        "id": name, "request": name, "index": 0, "job": "j", "episode": f"e-{name}", "alone": True, "key_id": "asker",
        "user": "u", "split": "train", "untrainable": "", "prompt_ids": [7, 8], "token_ids": [1, 2],
        "logprobs": [-0.5, -0.5], "spans": [Span(version, 0, 2)], "sampling": Sampling(max_new_tokens=4),
        "finish": "stop", "template": "t", "body_digest": "b", "text": "x", "started": NOW - 1, "first_token": NOW,
        "ended": NOW,
    }  # fmt: skip
    return Interaction(**fields | changes)


def item(kind: str, name: str = "f1", **changes: Any) -> Feedback:
    fields: dict[str, Any] = {"id": name, "job": "j", "kind": kind, "key_id": "k1", "received": NOW}
    if kind == "correction":
        fields |= {"inference": "i1", "body": {"corrected": {"role": "assistant", "content": "better"}}}
    if kind == "preference":
        fields |= {"inference": "i1", "body": {"chosen": "i1", "rejected": "i2", "strength": 0.5}}
    if kind == "metric":
        fields |= {"inference": "i1", "metric": "reward", "value": 0.5}
    return Feedback(**fields | changes)


def matched(items: list[Feedback], records: Sequence[Interaction] = (), *, version: int = 5, **online: Any) -> Matching:
    """Return a matching that has read ``items`` and ``records``; its ``statuses`` are those other than matched."""
    matching = Matching(job(**online))
    statuses = [one for seq, found in enumerate(items, 1) for one in matching.on_feedback(seq, found, NOW)]
    statuses += [one for seq, record in enumerate(records, 11) for one in matching.on_interaction(seq, record)]
    statuses += matching.sweep(version=version, now=NOW + 1)
    matching.statuses = [(one.status, one.reason) for one in statuses if one.status != "matched"]  # type: ignore[attr-defined]
    return matching


def ready_examples(matching: Matching) -> list[tuple[str, str, float]]:
    return [(example.objective, example.reason, example.reward) for example in matching.examples.ready.values()]


def statuses_of(matching: Matching) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = matching.statuses  # type: ignore[attr-defined]
    return found


# -- rows 2 to 6 of the admission table --------------------------------------------------------------------------------


def test_row_2_a_good_old_answer_is_imitated_and_a_bad_one_is_not() -> None:
    for value, reward, expected in ((0.5, 0.5, "supervised"), (-0.5, None, "stale")):
        matching = matched([item("metric", value=value)], [served("i1", version=3)])
        if reward is None:
            assert statuses_of(matching) == [("rejected", expected)]
            continue
        (trajectory,) = matching.ready["i1"]
        assert (trajectory.objective, trajectory.reward) == (expected, reward)
    assert statuses_of(matched([item("metric")], [served("i1", version=3)], off_policy=None)) == [("rejected", "stale")]


def test_a_good_answer_from_another_distribution_is_imitated() -> None:
    greedy = {"untrainable": "sampling_not_replayable", "sampling": Sampling(max_new_tokens=4, temperature=0.0)}
    (trajectory,) = matched([item("metric")], [served("i1", **greedy)]).ready["i1"]
    assert trajectory.objective == "supervised"
    assert statuses_of(matched([item("metric", value=-0.5)], [served("i1", **greedy)])) == [
        ("rejected", "sampling_not_replayable")
    ]
    formed = {"untrainable": "constrained", "constraint": "response_format"}
    (trajectory,) = matched([item("metric")], [served("i1", **formed)]).ready["i1"]
    assert trajectory.objective == "supervised"
    assert statuses_of(matched([item("metric", value=-0.5)], [served("i1", **formed)])) == [("rejected", "constrained")]
    assert statuses_of(matched([item("metric")], [served("i1", **formed)], off_policy=None)) == [
        ("rejected", "constrained")
    ]
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"untrainable": "opted_out"}, "opted_out"),
        ({"untrainable": "client_disconnected"}, "client_disconnected"),
        (greedy | {"prompt_ids": [1] * 17}, "prompt_too_long"),
        (greedy | {"split": "val"}, "split_val"),
    )
    for changes, reason in refused:
        assert statuses_of(matched([item("metric")], [served("i1", **changes)])) == [("rejected", reason)]


def test_row_2_an_old_answer_waits_for_feedback_and_not_for_ever() -> None:
    matching = matched([], [served("i1", version=3)], idle_ttl_s=60.0)
    assert matching.num_waiting == 1
    matching.sweep(version=5, now=NOW + 61)
    assert matching.num_waiting == 0, "it has no feedback"
    matching = matched([], [served("i1", version=3, tool_calls_valid=False)])
    assert matching.num_waiting == 0, "a broken call is not imitated"


@pytest.mark.parametrize(
    ("body", "posted", "expected"),
    [
        (EXACT, TRUSTED, ("policy", "posted", 0.5)),  # row 3
        (EXACT | {"policy_version": 4}, TRUSTED, ("policy", "posted", 0.5)),
        (EXACT | {"policy_version": 3}, TRUSTED, ("supervised", "stale", 0.5)),
        (EXACT | {"policy_version": 6}, TRUSTED, ("supervised", "unknown_version", 0.5)),
        (EXACT | {"sampling": {"temperature": 0.5}}, TRUSTED, ("supervised", "sampling_not_replayable", 0.5)),
        (EXACT, {}, ("supervised", "source_not_trusted", 0.5)),
        (EXACT, {"trusted_keys": ["*"]}, ("policy", "posted", 0.5)),
        (TOKENS | {"policy_version": 5}, TRUSTED, ("policy", "rescored", 0.5)),  # row 4
        (TOKENS | {"policy_version": 4}, TRUSTED, ("supervised", "version_not_held", 0.5)),
        (TOKENS | {"policy_version": 4}, TRUSTED | {"held_versions": 1}, ("policy", "rescored", 0.5)),
        (TOKENS | {"policy_version": 3}, TRUSTED | {"held_versions": 1}, ("supervised", "version_not_held", 0.5)),
        (TOKENS | {"policy_version": 3}, TRUSTED | {"held_versions": 2}, ("supervised", "stale", 0.5)),
        (TOKENS, TRUSTED, ("supervised", "behaviour_unknown", 0.5)),  # row 5
        (TOKENS, TRUSTED | {"assume_on_policy": True}, ("policy", "assumed", 0.5)),
        (TOKENS, {"assume_on_policy": True}, ("supervised", "source_not_trusted", 0.5)),
        ({"messages": [], "completion": {}, "reward": 1.0}, TRUSTED, ("supervised", "text_only", 1.0)),  # row 6
    ],
)
def test_rows_3_to_6_posted_interactions(body: dict[str, Any], posted: Any, expected: tuple[str, str, float]) -> None:
    matching = matched([item("interaction", body=body)], posted=posted)
    assert ready_examples(matching) == [expected]
    if expected[0] == "supervised":
        reason = expected[1]
        assert statuses_of(matched([item("interaction", body=body)], posted=posted, off_policy=None)) == [
            ("rejected", reason)
        ]
        bad = item("interaction", body=body | {"reward": -0.5})
        assert statuses_of(matched([bad], posted=posted)) == [("rejected", reason)], "only good answers are imitated"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": [-0.5]}, "lengths_differ"),
        ({"logprobs": [-0.5, math.nan]}, "not_finite"),
        ({"logprobs": [-0.5, -math.inf]}, "not_finite"),
        ({"logprobs": [-0.5, 0.5]}, "not_finite"),
        ({"prompt_token_ids": [1] * 17}, "prompt_too_long"),
        ({"prompt_token_ids": []}, "no_tokens"),
        ({"token_ids": [1] * 5, "logprobs": [-1.0] * 5}, "completion_too_long"),
    ],
)
def test_posted_tokens_that_cannot_be_scored_reach_no_batch(changes: dict[str, Any], reason: str) -> None:
    matching = matched([item("interaction", body=EXACT | changes)], posted=TRUSTED)
    assert statuses_of(matching) == [("rejected", reason)]
    assert not matching.examples.ready


def test_a_posted_reward_is_the_sum_of_declared_metrics() -> None:
    metrics = {"a": {"type": "float", "weight": 0.5}, "b": {"type": "boolean", "default_value": False}}
    body = {name: value for name, value in EXACT.items() if name != "reward"}
    matching = matched([item("interaction", body=body | {"rewards": {"a": 1.0}})], posted=TRUSTED, metrics=metrics)
    assert ready_examples(matching) == [("policy", "posted", -0.5)]
    nothing = matched([item("interaction", body=body)], posted=TRUSTED, metrics=metrics)
    assert statuses_of(nothing) == [("rejected", "no_reward")]
    liked = matched([item("interaction", body=body | {"rewards": {"liked": 1.0}})], posted=TRUSTED, metrics=metrics)
    assert statuses_of(liked) == [("rejected", "no_reward")]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"rewards": {"b": True}}, 1.0),
        ({"rewards": {"b": False}}, -0.5),
        ({"rewards": {"b": False, "a": 1.0}}, 0.0),
        ({"reward": 0.25}, 1.25),
        ({"reward": 5.0, "rewards": {"b": False}}, 0.5),
        ({"rewards": {"reward": -0.25, "b": True}}, 0.75),
    ],
)
def test_a_posted_reward_includes_booleans_and_the_undeclared_reward(rewards: dict[str, Any], expected: float) -> None:
    metrics = {
        "a": {"type": "float", "weight": 0.5},
        "b": {"type": "boolean", "when_false": -0.5, "default_value": True},
    }
    body = {name: value for name, value in EXACT.items() if name != "reward"}
    matching = matched([item("interaction", body=body | rewards)], posted=TRUSTED, metrics=metrics)
    assert ready_examples(matching) == [("policy", "posted", expected)]


def test_a_declared_reward_may_be_a_boolean() -> None:
    metrics = {"reward": {"type": "boolean", "when_true": 0.5}}
    (example,) = ready_examples(
        matched([item("interaction", body=EXACT | {"reward": True})], posted=TRUSTED, metrics=metrics)
    )
    assert example == ("policy", "posted", 0.5)


def test_a_key_with_wrong_log_probs_is_distrusted() -> None:
    matching = Matching(job(posted=TRUSTED))
    matching.on_feedback(1, item("interaction", body=EXACT), NOW)
    matching.sweep(version=5, now=NOW)
    state = LedgerState()
    (example,) = matching.examples.ready.values()
    state.apply(Drawn(writer_epoch=1, time=NOW, start=0, stop=1, min_version=0, deadline=NOW))
    admitted = Admitted(
        writer_epoch=1, time=NOW, admissions=[example.admission(0, 5, NOW)], low_interactions=1, low_feedback=1
    )
    state.apply(admitted)
    state.apply(
        Dropped(
            writer_epoch=1, time=NOW, draws=[Draw(0)], reason=LOGPROBS_DIFFER, lengths=[0], redraw=False,
            min_version=0, deadline=NOW,
        )
    )  # fmt: skip
    assert state.distrusted == {"k1"}
    matching.on_admitted(admitted.admissions)
    matching.examples.distrusted = state.distrusted
    matching.on_feedback(2, item("interaction", "f2", body=EXACT), NOW)
    matching.sweep(version=5, now=NOW)
    assert ready_examples(matching) == [("supervised", "source_distrusted", 0.5)]


def test_a_post_must_have_the_temperature_of_the_job() -> None:
    matching = Matching(job(posted=TRUSTED))
    matching.on_feedback(1, item("interaction", body=EXACT | {"sampling": {"temperature": 0.5}}), NOW)
    for temperature, expected in ((1.0, "supervised"), (0.5, "policy"), (1.0, "supervised")):
        matching.examples.temperature = temperature
        matching.sweep(version=5, now=NOW)
        assert [objective for objective, _, _ in ready_examples(matching)] == [expected]


# -- corrections and preferences ---------------------------------------------------------------------------------------


def test_a_correction_and_a_demonstration_are_imitated_beside_the_answer_itself() -> None:
    for given in (item("correction"), item("metric", metric="demonstration", value="better")):
        matching = matched([given, item("metric", "f2")], [served("i1")])
        (example,) = matching.examples.ready.values()
        assert (example.objective, example.reward, dict(example.context)) == ("supervised", 1.0, {"i1": 11})
        assert matching.ready["i1"][0].objective == "policy"


def test_a_preference_is_between_two_answers_to_the_same_prompt() -> None:
    matching = matched([item("preference")], [served("i1"), served("i2", token_ids=[3, 4])])
    assert ready_examples(matching) == [("preference", "preference", 0.5)]
    (example,) = matching.examples.ready.values()
    assert list(example.context) == ["i1", "i2"], "the better one first"
    other = matched([item("preference")], [served("i1"), served("i2", prompt_ids=[9])])
    assert statuses_of(other) == [("rejected", "prompts_differ")]
    waits = matched([item("preference")], [served("i1")])
    assert not waits.examples.ready
    assert not statuses_of(waits)


def between(name: str = "f1", **changes: Any) -> Feedback:
    """Build a preference between two posted texts."""
    body = {"messages": [{"role": "user"}], "answers": [{"content": "a"}, {"content": "b"}], "strength": 0.25}
    return item("preference", name, inference="", body=body, user="v", **changes)


def test_a_preference_between_texts_needs_no_interaction() -> None:
    matching = matched([between()])
    assert ready_examples(matching) == [("preference", "texts", 0.25)]
    (example,) = matching.examples.ready.values()
    entry = example.admission(0, 5, NOW)
    assert (entry.feedback, entry.context, entry.version) == ({"f1": 1}, {}, -1)
    assert owners_of(entry) == (("k1",), ("k1",), ("v",))
    assert example.item.feedback.body == {"strength": 0.25}, "the texts stay in the stream"
    assert matching.low_water()[1] == 1, "they stay in the stream until the decision"
    assert statuses_of(matched([between()], off_policy={"supervised": {}})) == [("rejected", "preference_is_no_reward")]
    against = Matching(job(), opted_out=lambda user: user == "v")
    against.on_feedback(1, between(), NOW)
    assert [one.reason for one in against.sweep(version=5, now=NOW)] == ["opted_out"]
    erased = Erasure(user="v", interactions=[], feedback=["f1"], time=NOW)
    matching.on_erasure(erased, NOW)
    assert not matching.examples.ready


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"untrainable": "opted_out"}, "opted_out"),
        ({"split": "val"}, "split_val"),
        ({"prompt_ids": [1] * 17}, "prompt_too_long"),
    ],
)
def test_consent_split_and_length_apply_to_imitation(changes: dict[str, Any], reason: str) -> None:
    assert statuses_of(matched([item("correction")], [served("i1", **changes)])) == [("rejected", reason)]
    greedy = matched([item("correction")], [served("i1", untrainable="sampling_not_replayable")])
    assert ready_examples(greedy), "sampling does not matter here"


def test_kinds_of_feedback_that_the_job_does_not_use_are_rejected() -> None:
    for given, reason in ((item("correction"), "correction"), (item("preference"), "preference")):
        assert statuses_of(matched([given], off_policy=None)) == [("rejected", f"{reason}_is_no_reward")]
    comment = item("metric", metric="comment", value="hm")
    assert statuses_of(matched([comment])) == [("rejected", "comment_is_no_reward")]


def test_examples_expire_and_are_retracted_revised_and_deleted() -> None:
    matching = matched([item("correction")], match_ttl_s=60.0)
    assert matching.low_water() == (1, 1)
    statuses = matching.sweep(version=5, now=NOW + 61)
    assert [(one.status, one.reason) for one in statuses] == [("expired", "unknown_target")]
    matching = matched([item("correction")], [served("i1")])
    retraction = item("retraction", "r1", body={"feedback": "f1"})
    assert {one.feedback: one.status for one in matching.on_feedback(2, retraction, NOW)} == dict.fromkeys(
        ("f1", "r1"), "retracted"
    )
    assert not matching.examples.ready
    matching = matched([item("preference")], [served("i1"), served("i2")])
    matching.on_feedback(2, item("preference", revision=1, body={"chosen": "i2", "rejected": "i1"}), NOW)
    matching.sweep(version=5, now=NOW)
    (example,) = matching.examples.ready.values()
    assert (list(example.context), example.reward, example.item.seq) == (["i2", "i1"], 1.0, 2)
    statuses = matching.on_erasure(Erasure(user="u", interactions=["i2"], feedback=[], time=NOW), NOW)
    assert [(one.feedback, one.reason) for one in statuses] == [("f1", "erased")]
    assert not matching.examples.items


# -- draws and batches -------------------------------------------------------------------------------------------------


def admission(ordinal: int, objective: Objective, *, at: float = NOW, reason: str = "feedback") -> Admission:
    return Admission(
        ordinal, {f"i{ordinal}": ordinal + 1} if objective == "policy" else {}, {f"f{ordinal}": ordinal + 1}, 1.0, 0,
        "k1", "u", reason, at, objective,
    )  # fmt: skip


def header(ordinal: int, objective: Objective) -> GroupHeader:
    return GroupHeader(
        draw=Draw(ordinal), attempt="a", epoch=1, digest="d", nbytes=1, prompt_tokens=1, lengths=[1], rewards=[1.0],
        failed=[False], truncated=[False], finite=True, min_version=0, max_version=0, worker="w", objective=objective,
    )  # fmt: skip


def draft_of(config: OnlineJob, admissions: list[Admission], *, now: float = NOW, version: int = 0) -> Draft:
    state = LedgerState(version=version)
    count = len(admissions)
    state.apply(Drawn(writer_epoch=1, time=NOW, start=0, stop=count, min_version=0, deadline=NOW))
    state.apply(
        Admitted(writer_epoch=1, time=NOW, admissions=admissions, low_interactions=count + 1, low_feedback=count + 1)
    )
    candidates = {
        Draw(a.ordinal): Candidate(a.ordinal, header(a.ordinal, a.objective), Verdict.ACCEPT) for a in admissions
    }
    run = JobRun(config, state, num_ordinals=None, writer_epoch=1, source=LiveSource(config, Matching(config)))
    run.candidates = candidates
    return Draft(run, state, Inputs(now))


def chosen(objectives: list[Objective], *, now: float = NOW, **online: Any) -> list[int]:
    config = job(**online)
    draft = draft_of(config, [admission(n, objective) for n, objective in enumerate(objectives)], now=now)
    return [draw.ordinal for draw in batch_of(config, draft, list(draft.candidates))]


def test_auxiliary_groups_join_a_full_batch_up_to_their_share() -> None:
    others: list[Objective] = ["supervised", "preference", "supervised"]
    assert chosen([*others, "policy", "policy", "policy"]) == [], "not full, and no group has waited long"
    assert chosen([*others, "policy", "policy", "policy", "policy"]) == [0, 1, 3, 4, 5, 6]
    assert chosen(["supervised", *["policy"] * 4]) == [0, 1, 2, 3, 4]  # type: ignore[list-item]


def test_auxiliary_groups_can_form_a_batch() -> None:
    assert chosen(["supervised"]) == []
    assert chosen(["supervised"], now=NOW + 61) == [0]
    assert chosen(["supervised", "preference"]) == [0, 1], "the most that an update may have"
    assert chosen(["supervised", "preference", "policy"]) == []
    assert chosen(["supervised", "policy", "policy"], now=NOW + 61) == [0, 1, 2]


def test_with_a_promotion_gate_every_update_has_policy_groups() -> None:
    gate = {"promotion": {"min_entropy": 0.1}}
    assert chosen(["supervised", "preference"], now=NOW + 61, **gate) == []
    assert chosen(["supervised", "policy", "policy"], now=NOW + 61, **gate) == [0, 1, 2]


def test_no_more_than_a_quarter_of_a_batch_is_assumed() -> None:
    config = job(posted=TRUSTED | {"assume_on_policy": True})
    admissions = [admission(n, "policy", reason="assumed" if n < 3 else "feedback") for n in range(6)]
    draft = draft_of(config, admissions)
    assert [draw.ordinal for draw in batch_of(config, draft, list(draft.candidates))] == [0, 3, 4, 5]


def test_only_the_policy_loss_has_a_lag_bound() -> None:
    draft = draft_of(job(), [admission(0, "policy"), admission(1, "supervised")], version=9, now=NOW + 61)
    draft.drop()
    assert draft.state.dropped == {"stale": 1}
    draft.seal()
    (sealed,) = draft.state.sealed.values()
    assert [(group.draw.ordinal, group.objective) for group in sealed.groups] == [(1, "supervised")]
    assert draft.state.balanced()


def test_examples_are_admitted_with_their_objective() -> None:
    matching = matched([item("preference"), item("metric", "f2")], [served("i1"), served("i2", token_ids=[3, 4])])
    config, state = matching.job, LedgerState(version=5)
    run = JobRun(config, state, num_ordinals=None, writer_epoch=1)
    draft = Draft(run, state, Inputs(NOW))
    LiveSource(config, matching).draw(draft)
    found = {one.objective: one for one in draft.state.admissions.values()}
    assert set(found) == {"policy", "preference"}
    assert (found["preference"].context, found["preference"].feedback) == ({"i1": 11, "i2": 12}, {"f1": 1})
    assert found["preference"].askers == ["asker"]
    statuses = {one.feedback: one for one in feedback_statuses(draft.events, draft.state)}
    assert statuses["f1"].reason == "preference: preference"
    assert statuses["f1"].interactions == ["i1", "i2"]
    assert statuses["f2"].reason == "feedback"
    matching.on_admitted(draft.state.admissions.values())
    assert not matching.examples.items
    assert matching.num_waiting == 1, "the other answer may still be judged"


def test_an_example_is_settled_again_for_another_version() -> None:
    matching = matched([item("interaction", body=TOKENS)], posted=TRUSTED | {"assume_on_policy": True})
    for version, admitted in ((6, []), (5, [("assumed", 5, 0)])):
        run = JobRun(matching.job, LedgerState(version=version), num_ordinals=None, writer_epoch=1)
        draft = Draft(run, run.state, Inputs(NOW))
        LiveSource(matching.job, matching).draw(draft)
        assert [(one.reason, one.version, one.lag) for one in draft.state.admissions.values()] == admitted


def ahead(config: OnlineJob, *, sealed: int) -> LedgerState:
    """Build a ledger at version 5 with ``sealed`` batches that are sealed but not trained yet."""
    return LedgerState(
        version=5,
        sealed={
            number: BatchSealed(
                writer_epoch=1, time=NOW, number=number, revision=1, start_version=4 + number, update_index=0, groups=[]
            )
            for number in range(1, sealed + 1)
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "sealed", "admitted"),
    [
        (TOKENS | {"policy_version": 5}, 1, [("rescored", 5, 1)]),
        (TOKENS, 1, [("assumed", 5, 1)]),
        (TOKENS, 2, []),  # it would be too old for the next batch: it waits for the version before it
        (EXACT | {"policy_version": 6}, 1, []),  # engines may have the version already: it waits for the ledger
        (EXACT | {"policy_version": 7}, 1, [("unknown_version", -1, 0)]),
    ],
)
def test_an_answer_from_an_impossible_version_is_refused(
    body: dict[str, Any], sealed: int, admitted: list[tuple[str, int, int]]
) -> None:
    matching = Matching(job(posted=TRUSTED | {"assume_on_policy": True}))
    matching.on_feedback(1, item("interaction", body=body), NOW)
    state = ahead(matching.job, sealed=sealed)
    matching.sweep(version=state.start_version(state.next_number), newest=state.version, now=NOW)
    assert "f1" in matching.examples.items
    draft = Draft(JobRun(matching.job, state, num_ordinals=None, writer_epoch=1), state, Inputs(NOW))
    LiveSource(matching.job, matching).draw(draft)
    assert [(one.reason, one.version, one.lag) for one in draft.state.admissions.values()] == admitted


def test_an_answer_waits_until_the_ledger_knows_its_version() -> None:
    for trained, expected in ((True, ("policy", "posted", 0.5)), (False, ("supervised", "unknown_version", 0.5))):
        matching = Matching(job(posted=TRUSTED))
        matching.on_feedback(1, item("interaction", body=EXACT | {"policy_version": 6}), NOW)
        matching.sweep(version=6, newest=5, now=NOW)
        assert not ready_examples(matching)
        matching.sweep(version=5 + trained, newest=5 + trained, now=NOW)
        assert ready_examples(matching) == [expected]


def test_a_preference_needs_the_consent_of_both_users() -> None:
    matching = Matching(job(), opted_out=lambda user: user == "v")
    matching.on_feedback(1, item("preference"), NOW)
    for seq, (name, user) in enumerate((("i1", "u"), ("i2", "v")), 11):
        matching.on_interaction(seq, served(name, user=user, token_ids=[seq]))
    assert "opted_out" in [one.reason for one in matching.sweep(version=5, now=NOW)]
    assert not matching.examples.ready
    both = matched([item("preference")], [served("i1"), served("i2", user="v", token_ids=[3])])
    (example,) = both.examples.ready.values()
    entry = example.admission(0, 5, NOW)
    assert owners_of(entry).users == ("u", "v")
    assert owners_of(msgspec.structs.replace(entry, users=[])).users == ("u",), "as in ledgers of earlier versions"


def test_auxiliary_updates_make_no_waiting_group_too_old() -> None:
    admissions = [admission(n, objective) for n, objective in enumerate(("supervised", "preference", "policy"))]
    for version, expected in ((0, [0, 1]), (1, [])):
        draft = draft_of(job(), admissions, now=NOW + 61, version=version)
        assert [draw.ordinal for draw in batch_of(job(), draft, list(draft.candidates))] == expected


def test_one_key_has_its_share_of_the_auxiliary_groups() -> None:
    config = job(max_share_per_key=0.5)
    keys = ["flood", "flood", "k2", *(f"p{n}" for n in range(4))]
    admissions = [
        msgspec.structs.replace(admission(n, "policy" if n > 2 else "supervised"), judges=[key], askers=[key])
        for n, key in enumerate(keys)
    ]
    draft = draft_of(config, admissions)
    assert [draw.ordinal for draw in batch_of(config, draft, list(draft.candidates))] == [0, 2, 3, 4, 5, 6]


def test_one_key_has_its_share_of_the_auxiliary_draws() -> None:
    config = job(max_share_per_key=0.5)
    matching = Matching(config)
    for n, key in enumerate(["flood"] * 6 + ["k2"]):
        demonstration = {"metric": "demonstration", "value": "better", "inference": f"i{n}", "key_id": key}
        matching.on_feedback(n + 1, item("metric", f"f{n}", **demonstration), NOW)
        matching.on_interaction(n + 11, served(f"i{n}"))
    matching.sweep(version=0, now=NOW)
    draft = Draft(JobRun(config, LedgerState(), num_ordinals=None, writer_epoch=1), LedgerState(), Inputs(NOW))
    LiveSource(config, matching).draw(draft)
    found = Counter(one.key_id for one in draft.state.admissions.values() if one.objective != "policy")
    assert found == {"flood": 2, "k2": 1}, "half of the four draws that the lag bound allows"


def test_a_preference_needs_two_answers() -> None:
    body = {"chosen": "i1", "rejected": "i1", "strength": 1.0}
    assert statuses_of(matched([item("preference", body=body)], [served("i1")])) == [("rejected", "same_answer")]


def test_an_audit_finds_another_objective_and_forgives_its_lag() -> None:
    old = admission(0, "supervised")
    draft = draft_of(job(), [old], now=NOW + 61)
    draft.drop()
    draft.seal()
    (sealed,) = draft.state.sealed.values()
    assert flaws_of_admission([draft.events], {1: sealed}, job())[1] == [
        "batch 1: draw 0.0 was trained without an admission"
    ]
    entries = [[Admitted(writer_epoch=1, time=NOW, admissions=[old], low_interactions=1, low_feedback=1)]]
    assert flaws_of_admission(entries, {1: sealed}, job())[1] == []
    as_policy = admission(0, "policy")
    entries = [[Admitted(writer_epoch=1, time=NOW, admissions=[as_policy], low_interactions=1, low_feedback=1)]]
    (flaw,) = flaws_of_admission(entries, {1: sealed}, job())[1]
    assert "supervised" in flaw


# -- the wire ----------------------------------------------------------------------------------------------------------


def test_a_group_names_its_objective_unless_it_is_the_policy() -> None:
    pair = example_group("j", Draw(1), [7, 8], [[1, 2], [3]], objective="preference", reward=0.5, epoch=1)
    data, head = encode_group(pair)
    back = decode_group(data)
    assert (back.objective, back.rewards.tolist(), back.lengths.tolist()) == ("preference", [0.5, 0.5], [2, 1])
    assert parse_group_header(group_headers(head)).objective == "preference"
    plain = encode_group(example_group("j", Draw(1), [7], [[1]], objective="policy", reward=1.0, epoch=1))[0]
    assert b"objective" not in plain
    assert b"assumed" not in plain
    assert decode_group(plain).objective == "policy"
    with pytest.raises(ProtocolError, match="needs 2 completions"):
        encode_group(example_group("j", Draw(1), [7], [[1]], objective="preference", reward=1.0, epoch=1))


def test_ledgers_without_objectives_mean_the_policy_loss() -> None:
    old = msgspec.msgpack.encode([0, {"i": 1}, {"f": 1}, 1.0, 0, "k", "u", "feedback", NOW])
    assert msgspec.msgpack.decode(old, type=Admission).objective == "policy"
