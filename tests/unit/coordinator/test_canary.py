"""Canary trials: who takes part, which conversations are compared, what the comparison decides, what an audit finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.leader.summary import canary_of
from penstock.services.coordinator.online.examples import InteractionRecord
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import LiveSource
from penstock.services.coordinator.training.canary import (
    Arm,
    Verdict,
    arms_of,
    flaws_of_canaries,
    is_in_canary,
    lower_bound,
    row_of,
    verdict_of,
)
from penstock.services.coordinator.training.decision import Draft, copy_state
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.rollout.serving.server import _untrainable
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.canary import CanaryConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchSealed,
    CanaryBegun,
    CanaryJudged,
    Judged,
    Promoted,
)
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import CANARY, NOT_COMPARED, Feedback, Interaction

NOW = 1000.0
CONFIG = CanaryConfig(conversations=10, max_drop=0.1, max_wait_s=600.0)
BEGUN = CanaryBegun(writer_epoch=1, time=NOW, version=1, number=1, digest="w1", served=0, share=0.2)


def promotions() -> Any:
    """Load ``test_promotion.py``, whose run without a bus the tests here use; return the module."""
    spec = importlib.util.spec_from_file_location("promotion_tests", Path(__file__).with_name("test_promotion.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GATE = promotions()


def judged(name: str, reward: float, *, is_canary: bool = True, conversation: str = "", key: str = "k") -> Judged:
    return Judged(conversation or f"c-{name}", is_canary, reward, [name], [key], ["asker"], ["u"])


def arms(canary: list[float], served: list[float]) -> list[Judged]:
    return [
        judged(f"{arm}{place}", reward, is_canary=arm == "c")
        for arm, rewards in (("c", canary), ("s", served))
        for place, reward in enumerate(rewards)
    ]


# -- arms --------------------------------------------------------------------------------------------------------------


def test_a_conversation_is_always_on_the_same_arm_and_each_trial_has_its_own() -> None:
    names = [f"episode-{n}" for n in range(4000)]
    first = {name for name in names if is_in_canary("job_a", 3, 0.2, name)}
    assert first == {name for name in reversed(names) if is_in_canary("job_a", 3, 0.2, name)}
    assert 0.17 < len(first) / len(names) < 0.23
    again = {name for name in names if is_in_canary("job_a", 4, 0.2, name)}
    assert 0.1 < len(first & again) / len(first) < 0.3, "independent of the earlier trial"
    wider = {name for name in names if is_in_canary("job_a", 3, 0.5, name)}
    assert first < wider


def test_the_unit_is_the_conversation() -> None:
    rows = [judged("a", 1.0, conversation="x"), judged("b", 0.0, conversation="x"), judged("c", 1.0, conversation="y")]
    canary, served = arms_of([*rows, judged("d", 1.0, conversation="x", is_canary=False)])
    assert (canary.count, canary.mean) == (2, 0.75)
    assert (served.count, served.mean) == (1, 1.0)


@pytest.mark.parametrize(
    ("level", "count", "quantile"),
    [(0.95, 6, 1.8125), (0.95, 16, 1.6973), (0.99, 11, 2.5280), (0.5, 6, 0.0)],
)
def test_arms_of_equal_spread_get_the_bound_of_students_t_test(level: float, count: int, quantile: float) -> None:
    """Arms of equal spread have 2 * (count - 1) degrees of freedom; the quantiles are from a table."""
    found = lower_bound(Arm(count, 0.5, 2.0), Arm(count, 0.2, 2.0), level)
    assert found == pytest.approx(0.3 - quantile * (4.0 / count) ** 0.5, abs=2e-3)


def test_the_bound_counts_the_degrees_of_freedom_of_the_smaller_arm() -> None:
    """Welch: variances 4 and 1 of 10 and 40 samples give (0.4 + 0.025)^2 / (0.4^2 / 9 + 0.025^2 / 39) = 10.151."""
    found = lower_bound(Arm(10, 0.0, 4.0), Arm(40, 0.0, 1.0), 0.95)
    assert found == pytest.approx(-1.8103 * 0.425**0.5, abs=2e-3)
    assert lower_bound(Arm(10, 0.3, 0.0), Arm(40, 0.5, 0.0), 0.95) == pytest.approx(-0.2)


# -- the verdict -------------------------------------------------------------------------------------------------------


def verdict(canary: list[float], served: list[float], *, now: float = NOW + 1, **config: Any) -> Verdict:
    return verdict_of(CONFIG.model_copy(update=config), BEGUN, arms_of(arms(canary, served)), now=now)


GOOD, BAD, MIXED = [1.0] * 10, [-1.0] * 10, [1.0, -1.0] * 5


@pytest.mark.parametrize(
    ("canary", "served", "status"),
    [
        (GOOD, GOOD, "passed"),
        (GOOD, BAD, "passed"),
        (BAD, GOOD, "refused"),
        (MIXED, GOOD, "refused"),
        (MIXED, MIXED, "refused"),  # too few to detect a difference of 0.1
        (GOOD[:9], GOOD, "wait"),
        (GOOD, GOOD[:9], "wait"),
        ([], [], "wait"),
    ],
)
def test_the_burden_of_proof_lies_on_the_new_version(canary: list[float], served: list[float], status: str) -> None:
    assert verdict(canary, served).status == status


def test_with_enough_conversations_equal_versions_pass() -> None:
    assert verdict(MIXED * 80, MIXED * 80).status == "passed"
    assert verdict([*BAD, *MIXED * 30], MIXED * 40, max_drop=0.1).status == "refused"
    assert verdict(MIXED, MIXED, confidence=0.5).status == "passed", "the means alone"


@pytest.mark.parametrize(
    ("canary", "on_timeout", "status"),
    [
        ([], "refuse", "refused"),
        (GOOD[:5], "refuse", "refused"),
        ([], "promote", "timed out"),
        (GOOD[:5], "promote", "timed out"),
        (BAD[:5], "promote", "refused"),  # the few samples are bad enough
    ],
)
def test_a_time_limit_decides_without_enough_feedback(canary: list[float], on_timeout: str, status: str) -> None:
    assert verdict(canary, GOOD, now=NOW + 599.0).status == "wait"
    found = verdict(canary, GOOD, now=NOW + 600.0, on_timeout=on_timeout)
    assert found.status == status
    assert f"{len(canary)} and 10 of 10 conversations judged in 600 s" in found.reason


def test_the_figures_describe_both_arms() -> None:
    found = verdict(MIXED, GOOD)
    assert found.figures["canary/reward"] == 0.0
    assert found.figures["canary/served_reward"] == 1.0
    assert (found.figures["canary/conversations"], found.figures["canary/served_conversations"]) == (10.0, 10.0)
    assert found.reason.startswith("canary reward 0, 1 of version 0: lower by up to 1.6")
    row = row_of(CONFIG, BEGUN, arms_of(arms(MIXED, [])))
    assert (row["version"], row["conversations"], row["reward"], row["served_reward"]) == (1, 10, 0.0, None)


# -- the gate ----------------------------------------------------------------------------------------------------------


def trial(**canary: Any) -> Any:
    """Start a run whose version 1 passed the bound and is on trial; return the run."""
    settings = {"conversations": 10, "share": 0.2, "max_wait_s": 600.0, **canary}
    run = GATE.Lineage(GATE.job(max_lag=2, min_entropy=0.5, patience=2, canary=settings))
    run.given(announced=0)
    run.begun = run.train()
    return run


def judge(run: Any, canary: list[float], served: list[float]) -> list[Any]:
    """Add rewards to both arms of the trial; return the events of the next decision."""
    run.run.commit(
        [CanaryJudged(writer_epoch=1, time=NOW, version=run.state.canary.version, judged=arms(canary, served))]
    )
    return run.decide()


def test_a_version_that_keeps_the_bounds_is_tried_before_it_is_served() -> None:
    run = trial()
    (begun,) = [event for event in run.begun if isinstance(event, CanaryBegun)]
    assert (begun.version, begun.served, begun.share, begun.figures) == (1, 0, 0.2, {"policy/entropy": 1.0})
    assert run.state.promoted.version == 0
    status, reason, message = run.gate.fact(run.state)
    assert (status, reason) == ("Unknown", "Canary")
    assert message.startswith("version 1 answers 20% of the conversations; 0 of its and 0 of the others, of 10 each")
    assert not run.gate.lets_train(run.state, 0), "its weights must stay"
    assert run.run.source.idle(run.state)[:2] == ("False", "Canary")
    assert run.decide() == []
    shown = canary_of(run.run)
    assert shown is not None
    assert (shown["version"], shown["share"], shown["needed"]) == (1, 0.2, 10)
    assert GATE.decisions(judge(run, GOOD, GOOD)) == [("Promoted", 1, "passed")]
    figures = run.state.promoted.figures
    assert (figures["policy/entropy"], figures["canary/conversations"]) == (1.0, 10.0)
    assert (run.state.canary, run.state.judged, canary_of(run.run)) == (None, {}, None)


def test_a_worse_version_is_refused_and_training_goes_back() -> None:
    run = trial()
    run.given(announced=0)
    (refused,) = GATE.decisions(judge(run, BAD, GOOD))
    assert refused[:2] == ("PromotionRefused", 1)
    assert "canary reward -1, 1 of version 0" in refused[2]
    assert run.gate.lets_train(run.state, 0), "within the patience"
    assert [type(event) for event in run.train()][-1] is CanaryBegun
    assert run.gate.fact(run.state)[1] == "Canary", "an earlier refusal is not the awaited decision"
    judge(run, BAD, GOOD)
    assert run.rollback is not None
    assert run.rollback.number == 0


def test_a_manual_promotion_or_a_fork_ends_the_trial() -> None:
    run = trial()
    run.given(forced=1)
    assert GATE.decisions(run.decide()) == [("Promoted", 1, "by request")]
    assert run.state.canary is None
    other = trial()
    events = other.fork(1)
    assert GATE.decisions(events) == [("Promoted", 2, "rolled back")], "these are the weights that are served"
    assert other.state.canary is None


def test_a_version_that_failed_a_bound_gets_no_trial() -> None:
    run = trial()
    judge(run, GOOD, GOOD)
    run.given(announced=1)
    events = run.train(policy__entropy=0.1)
    assert GATE.decisions(events) == [("PromotionRefused", 2, "policy/entropy 0.1 < 0.5")]
    assert run.state.canary is None


def test_a_trial_needs_no_other_bound_and_its_figures_survive_the_leader() -> None:
    run = GATE.Lineage(GATE.job(max_drop=0.1, canary={"conversations": 10}))
    run.evaluate(0.5)
    run.train(0.5)
    assert run.state.canary is not None
    run.given(evaluated=None)  # another leader, which does not find the row of the evaluation
    assert GATE.decisions(judge(run, GOOD, GOOD)) == [("Promoted", 1, "passed")]
    assert run.state.promoted.figures[GATE.METRIC] == 0.5
    alone = GATE.Lineage(GATE.job(canary={}))
    assert isinstance(alone.train()[-1], CanaryBegun)


@pytest.mark.parametrize("change", [{"conversations": 3}, {"share": 0.6}, {"confidence": 1.0}, {"wait_s": 1.0}])
def test_a_trial_that_cannot_decide_is_refused_at_load(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        GATE.job(canary=change)


# -- what is compared --------------------------------------------------------------------------------------------------


def job(**online: Any) -> OnlineJob:
    canary = {"conversations": 10, "share": 0.2}
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
            "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 4, "max_lag": 1},
            "online": {
                "metrics": {"rating": {"type": "float"}}, "gamma": 0.0,
                "promotion": {"min_entropy": 0.1, "canary": canary}, **online,
            },
        }
    )  # fmt: skip


def answer(name: str, *, version: int = 1, untrainable: str = CANARY, episode: str = "", **changes: Any) -> Interaction:
    fields: dict[str, Any] = {
        "id": name, "request": name, "index": 0, "job": "j", "episode": episode or f"e-{name}", "alone": not episode,
        "key_id": "asker", "user": "u", "split": "train", "untrainable": untrainable, "prompt_ids": [7],
        "token_ids": [1], "logprobs": [-0.5], "spans": [Span(version, 0, 1)], "sampling": Sampling(max_new_tokens=4),
        "finish": "stop", "template": "t", "body_digest": "b", "text": "x", "started": NOW + 1, "first_token": NOW + 1,
        "ended": NOW + 1,
    }  # fmt: skip
    return Interaction(**fields | changes)


def rating(about: str, value: float = 0.5, **changes: Any) -> Feedback:
    fields: dict[str, Any] = {"inference": about, "key_id": "judge", "received": NOW + 2} | changes
    return Feedback(id=f"f-{about}", job="j", kind="metric", metric="rating", value=value, **fields)


class Live:
    """A trial of version 1 against version 0, with feedback on live answers."""

    def __init__(self, config: OnlineJob, *opted_out: str) -> None:
        self.matching = Matching(config, opted_out=lambda user: user in opted_out)
        self.run = GATE.Lineage(config)
        self.run.train()
        assert self.run.state.canary is not None
        self.seq, self.statuses = 0, []

    def serve_rated(self, *answers: Interaction, value: float | None = 0.5, **changes: Any) -> None:
        for one in answers:
            self.seq += 1
            self.statuses += self.matching.on_interaction(self.seq, one)
            if value is not None:
                self.statuses += self.matching.on_feedback(self.seq, rating(one.id, value, **changes), NOW + 2)
        self.statuses += self.matching.sweep(version=1, now=NOW + 3)

    def drafted(self) -> list[Judged]:
        """Let the leader record the judged conversations of the trial; return them."""
        draft = Draft(self.run.run, copy_state(self.run.state), Inputs(NOW + 3))
        self.matching.trials.draft(draft)
        self.run.run.commit(draft.events)
        self.matching.trials.discard_recorded(self.run.state)
        return [one for event in draft.events if isinstance(event, CanaryJudged) for one in event.judged]


def test_both_arms_are_compared_and_only_the_served_one_is_trained() -> None:
    live = Live(job())
    live.serve_rated(answer("a"), value=None)
    assert (live.drafted(), live.matching.num_waiting) == ([], 1), "it waits for feedback"
    live.statuses += live.matching.on_feedback(9, rating("a", 0.25), NOW + 2)
    live.serve_rated(answer("b", version=0, untrainable=""))
    rows = live.drafted()
    assert [(row.interactions, row.is_canary, row.reward, row.judges) for row in rows] == [
        (["a"], True, 0.25, ["judge"]),
        (["b"], False, 0.5, ["judge"]),
    ]
    assert [(one.status, one.reason) for one in live.statuses if one.feedback == "f-a"][-1] == ("rejected", CANARY)
    assert list(live.matching.ready) == ["b"]
    assert live.drafted() == [], "recorded once"
    assert [one.reason for one in live.matching.on_feedback(10, rating("a", 1.0, key_id="late"), NOW)] == []


def test_objections_and_retractions_remove_samples() -> None:
    live = Live(job(), "out")
    live.serve_rated(answer("a", user="out"), answer("b", version=0, untrainable="", user="out"))
    assert live.drafted() == []
    live.serve_rated(answer("c", version=0, untrainable=""))
    taken = Feedback(id="r", job="j", kind="retraction", key_id="judge", received=NOW, body={"feedback": "f-c"})
    live.matching.on_feedback(9, taken, NOW + 3)
    live.serve_rated(answer("d", version=0, untrainable=""))
    assert [row.interactions for row in live.drafted()] == [["d"]]


def test_stale_answers_of_the_served_version_are_compared() -> None:
    live = Live(job())
    live.serve_rated(answer("a", version=0, untrainable=""), value=None)
    live.matching.sweep(version=9, now=NOW + 3)
    assert live.matching.num_waiting == 1
    live.statuses += live.matching.on_feedback(9, rating("a"), NOW + 2)
    live.statuses += live.matching.sweep(version=9, now=NOW + 3)
    assert [row.interactions for row in live.drafted()] == [["a"]]
    assert live.statuses[-1].reason == "stale"


@pytest.mark.parametrize(
    "one",
    [
        answer("a", untrainable=NOT_COMPARED),
        answer("a", untrainable="opted_out"),
        answer("a", split="val"),
        answer("a", version=0),
        answer("a", version=0, untrainable="", started=NOW - 1),
        answer("a", version=2, untrainable=""),
        answer("a", spans=[Span(1, 0, 1), Span(0, 1, 2)], token_ids=[1, 2], logprobs=[-0.1, -0.1]),
        answer("a", logprobs=[float("nan")]),
    ],
)
def test_only_trainable_answers_are_compared(one: Interaction) -> None:
    """Answers of a worker without the version, from before the trial, of several versions, or broken are left out."""
    live = Live(job())
    live.serve_rated(one)
    assert live.drafted() == []


def test_missing_feedback_counts_only_with_a_default() -> None:
    live = Live(job(idle_ttl_s=1.0))
    live.serve_rated(answer("a"), value=None)
    live.statuses += live.matching.sweep(version=1, now=NOW + 50)
    assert (live.drafted(), live.matching.num_waiting) == ([], 0)
    worth = {"rating": {"type": "float", "default_after_s": 10.0, "default_value": -0.5}}
    other = Live(job(metrics=worth))
    other.serve_rated(answer("a"), value=None)
    other.matching.sweep(version=1, now=NOW + 50)
    assert [row.reward for row in other.drafted()] == [-0.5]


@pytest.mark.parametrize(
    "how", [{"untrainable": "sampling_not_replayable"}, {"sampling": Sampling(max_new_tokens=4, temperature=0.0)}]
)
def test_imitated_answers_are_compared_in_neither_arm(how: dict[str, Any]) -> None:
    live = Live(job(off_policy={"supervised": {}}))
    trial = {"untrainable": CANARY} | how
    if how.get("untrainable"):
        trial["untrainable"] = NOT_COMPARED
    live.serve_rated(answer("a", **trial), answer("b", version=0, **{"untrainable": ""} | how))
    assert live.drafted() == []
    assert list(live.matching.ready) == ["b"], "it is imitated"


def test_a_stale_answer_counts_with_its_worst_feedback() -> None:
    worth = {"rating": {"type": "float", "default_after_s": 10.0, "default_value": -0.5}}
    live = Live(job(metrics=worth, off_policy={"supervised": {}}))
    old: dict[str, Any] = {"version": 0, "untrainable": ""}
    live.serve_rated(answer("broken", tool_calls_valid=False, **old), answer("silent", **old), value=None)
    live.matching.sweep(version=9, now=NOW + 50)
    assert {row.interactions[0]: row.reward for row in live.drafted()} == {"broken": -1.0, "silent": -0.5}


def test_an_unfinished_episode_is_compared_in_both_arms() -> None:
    live = Live(job(gamma=1.0, unfinished="mask", off_policy={"supervised": {}}, idle_ttl_s=10.0))
    live.serve_rated(
        answer("a", episode="new", alone=False), answer("b", version=0, untrainable="", episode="old", alone=False)
    )
    live.matching.sweep(version=9, now=NOW + 50)
    assert sorted((row.is_canary, row.reward) for row in live.drafted()) == [(False, 0.5), (True, 0.5)]
    assert not live.matching.ready, "no client ended it: it is not imitated"


def test_a_conversation_with_a_trial_answer_is_not_trained() -> None:
    live = Live(job(gamma=1.0))
    turns = [
        answer("a", version=0, untrainable="", episode="talk", started=NOW + 1),
        answer("b", version=1, untrainable=CANARY, episode="talk", started=NOW + 2),
    ]
    live.serve_rated(*turns, final=True)
    assert live.matching.ready == {}
    assert {one.reason for one in live.statuses if one.status == "rejected"} == {CANARY}
    assert live.drafted() == [], "two versions wrote it"
    whole = Live(job(gamma=1.0))
    whole.serve_rated(*(answer(name, episode="talk") for name in "ab"), value=0.25, final=True)
    assert [(row.reward, row.interactions) for row in whole.drafted()] == [(0.5, ["a", "b"])]


def test_feedback_counts_before_the_time_limit_and_while_paused() -> None:
    live = Live(job())
    live.run.run.source = LiveSource(live.run.run.config, live.matching)
    live.serve_rated(*(answer(f"c{n}") for n in range(10)))
    live.serve_rated(*(answer(f"s{n}", version=0, untrainable="") for n in range(10)))
    events = live.run.run.decide(Inputs(NOW + 9999, desired="paused"))
    assert [type(event).__name__ for event in events] == ["PhaseChanged", "CanaryJudged", "Promoted"]


def test_no_owner_decides_a_trial_alone() -> None:
    live = Live(job(max_share_per_key=0.25))
    live.serve_rated(*(answer(f"a{n}") for n in range(5)), key_id="loud")
    live.serve_rated(*(answer(f"b{n}") for n in range(2)), key_id="calm")
    rows = live.drafted()
    assert [row.judges[0] for row in rows] == ["loud", "loud", "calm", "calm"], "a quarter of ten"
    live.serve_rated(answer("a9"), key_id="loud")
    assert live.drafted() == []
    live.serve_rated(answer("s", version=0, untrainable=""), key_id="loud")
    assert [row.is_canary for row in live.drafted()] == [False], "each arm has its own share"


def test_a_correction_of_a_trial_answer_is_not_imitated() -> None:
    config = job(off_policy={"supervised": {}})
    matching = Matching(config)
    matching.on_interaction(1, answer("a"))
    item = replace(rating("a"), kind="correction", metric="", body={"corrected": "x"})
    matching.examples.add_record("a", InteractionRecord.of(1, answer("a")))
    statuses = matching.on_feedback(1, item, NOW)
    statuses += matching.sweep(version=1, now=NOW)
    assert (statuses[-1].status, statuses[-1].reason) == ("rejected", CANARY)


@pytest.mark.parametrize(
    ("asked", "broken_off", "drawn", "found"),
    [
        ("", False, "", ""),
        ("", False, "sampling_not_replayable", "sampling_not_replayable"),
        ("", False, "constrained", "constrained"),
        ("", True, "constrained", "client_disconnected"),
        ("side_turn", False, "constrained", "side_turn"),
        ("side_turn", True, "", "client_disconnected"),
        (CANARY, False, "", CANARY),
        (CANARY, False, "sampling_not_replayable", NOT_COMPARED),
        (CANARY, False, "constrained", NOT_COMPARED),
        (CANARY, True, "", NOT_COMPARED),
    ],
)
def test_a_record_is_marked_as_trainable_or_comparable(asked: str, broken_off: bool, drawn: str, found: str) -> None:
    assert _untrainable(asked, broken_off=broken_off, drawn=drawn) == found


# -- audit -------------------------------------------------------------------------------------------------------------


def test_an_audit_finds_violations_of_a_trial() -> None:
    config = GATE.job(canary={"conversations": 10}).online.promotion
    epoch: dict[str, Any] = {"writer_epoch": 1, "time": NOW + 1}

    def history(
        judged: list[Judged], *, reason: str = "passed", begun: bool = True, name: str = "x"
    ) -> list[list[Any]]:
        promoted = Promoted(**epoch, version=1, number=1, digest="w1", reason=reason)
        admission = Admission(0, {name: 1}, {}, 1.0, 0, "k", "u", "feedback", NOW)
        recorded = CanaryJudged(**epoch, version=1, judged=judged)
        admitted = Admitted(**epoch, admissions=[admission], low_interactions=1, low_feedback=1)
        return [[*([BEGUN, recorded] if begun else []), promoted], [admitted]]

    assert not flaws_of_canaries(history(arms(GOOD, GOOD)), config)
    assert not flaws_of_canaries(history([], reason="by request", begun=False), config)
    (flaw,) = flaws_of_canaries(history(arms(BAD, GOOD)), config)
    assert "its canary is 'refused'" in flaw
    (flaw,) = flaws_of_canaries(history(arms(GOOD[:3], GOOD)), config)
    assert "its canary is 'wait'" in flaw
    (flaw,) = flaws_of_canaries(history([], begun=False), config)
    assert flaw == "version 1 was served to all without a canary"
    (flaw,) = flaws_of_canaries(history(arms(GOOD, GOOD), name="c3"), config)
    assert flaw == "interaction c3 of a canary was admitted"
    assert not flaws_of_canaries(history(arms(GOOD, GOOD), name="s3"), config), "the other arm is trained"


def test_a_ledger_refuses_a_trial_beside_a_batch_in_training() -> None:
    run = trial()
    judge(run, GOOD, GOOD)
    run.seal()
    assert any(isinstance(event, BatchSealed) for event in run.state.sealed.values())
    with pytest.raises(AssertionError, match="keeps its weights"):
        run.run.commit([CanaryBegun(writer_epoch=1, time=NOW, version=1, number=1, digest="w1", served=0, share=0.1)])
