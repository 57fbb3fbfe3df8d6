"""Which version is served: every bound, what a refusal leads to, and what the user may override."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from penstock.services.coordinator.leader.desired_state import DesiredState
from penstock.services.coordinator.leader.evaluation import EvaluationPlan
from penstock.services.coordinator.leader.measures import Measures
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.leader.summary import start_of
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import LiveSource
from penstock.services.coordinator.online.statuses import feedback_statuses
from penstock.services.coordinator.training.inputs import Evaluated, Inputs, Rollback
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.promotion import (
    PromotionGate,
    broken_bounds,
    flaws_of_promotions,
)
from penstock.services.coordinator.training.reports import Refusal
from penstock.services.coordinator.training.restart import earliest_start
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.data.check import SourceSummary
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    JobStarted,
    LineageForked,
    Promoted,
    PromotionRefused,
    SealedGroup,
    decode_events,
    encode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.jobs import JobRecord, Operation
from penstock.shared.protocol.messages import EvalResult, Report

NOW = 1000.0
METRIC = "eval/greedy"
MEASURED = {"mismatch/kl": 0.01, "policy/entropy": 1.0, "policy/kl_ref": 0.1}


def job(max_lag: int = 1, **promotion: Any) -> OnlineJob:
    held_out = {"data": {"eval": {"type": "addition"}}, "reward": {"scorers": [{"type": "exact"}]}}
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
            "train": {"batch_size": 2, "max_lag": max_lag}, "algorithm": {"type": "reinforce_pp", "kl": {"coef": 0.1}},
            "evaluation": {"every": 1, "num_prompts": 4}, "online": {"promotion": promotion}, **held_out,
        }
    )  # fmt: skip


class Lineage:
    """A run without a bus: it trains each batch at once, and the test sets the results of evaluations."""

    def __init__(self, config: OnlineJob) -> None:
        self.inputs = Inputs(NOW)
        assert config.online.promotion is not None
        gate = PromotionGate(config.online.promotion)
        source = LiveSource(config, Matching(config))
        self.run = JobRun(
            config, LedgerState(), num_ordinals=None, writer_epoch=1, source=source, promotion=gate,
        )  # fmt: skip
        self.gate = gate
        self.run.commit([JobStarted(writer_epoch=1, time=NOW, config_digest="c")])
        self.checkpoint(0)

    def given(self, **inputs: Any) -> None:
        """Change inputs of the decisions that follow."""
        self.inputs = replace(self.inputs, **inputs)

    @property
    def rollback(self) -> Rollback | None:
        return self.run.rollback(self.inputs)

    @property
    def state(self) -> LedgerState:
        return self.run.state

    def report(self, **fields: Any) -> list[Any]:
        report = Report(epoch=1, **fields)
        events = self.run.on_report(report, self.inputs)
        events = events + self.run.decide(self.inputs, after=events)
        self.run.commit(events)
        return events

    def decide(self) -> list[Any]:
        events = self.run.decide(self.inputs)
        self.run.commit(events)
        return events

    def checkpoint(self, number: int) -> list[Any]:
        state = self.state
        digest = state.digest if number else "w0"
        return self.report(kind="checkpointed", batch=number, version=state.version, digest=digest, path=f"c{number}")

    def seal(self) -> int:
        """Admit one draw, and seal the next batch with it; return the number of the batch."""
        state, epoch = self.state, {"writer_epoch": 1, "time": NOW}
        start, number = state.next_ordinal, state.next_number
        admission = Admission(
            start, {f"i{start}": start + 1}, {f"f{start}": start + 1}, 1.0, 0, "k", "u", "feedback", NOW
        )
        group = SealedGroup(Draw(start), "a", start + 1, "d", state.version, state.version, [1.0], 3, "online")
        self.run.commit(
            [
                Drawn(**epoch, start=start, stop=start + 1, min_version=0, deadline=NOW),
                Admitted(**epoch, admissions=[admission], low_interactions=1, low_feedback=1),
                BatchSealed(
                    **epoch, number=number, revision=1, start_version=state.start_version(number),
                    update_index=state.update_index(number), groups=[group],
                ),
            ]
        )  # fmt: skip
        return number

    def train(self, held_out: float | None = None, **measured: float) -> list[Any]:
        """Make one update, and evaluate it if ``held_out`` is given; return the events of the decisions."""
        number = self.seal()
        version = self.state.version + 1
        metrics = {**MEASURED, **{name.replace("__", "/"): value for name, value in measured.items()}}
        events = self.report(
            kind="trained", batch=number, revision=1, version=version, digest=f"w{version}", metrics=metrics
        )
        if held_out is not None:
            events += self.evaluate(held_out)
        return events

    def evaluate(self, held_out: float) -> list[Any]:
        self.given(evaluated=Evaluated(self.state.version, {METRIC: held_out}))
        return self.decide()

    def fork(self, batch: int, **more: Any) -> list[Any]:
        """Report a fork in which the trainer gives up ``batch`` and all later batches; return the events."""
        version = self.state.version + 1
        before = self.state.batches.get(batch - 1)
        digest = before.digest if before is not None else "w0"
        return self.report(kind="forked", batch=batch, version=version, digest=digest, reason="x", **more)


def decisions(events: list[Any]) -> list[tuple[str, int, str]]:
    return [
        (type(event).__name__, event.version, event.reason)
        for event in events
        if isinstance(event, Promoted | PromotionRefused)
    ]


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_the_first_version_is_served_and_measured_later() -> None:
    run = Lineage(job(max_drop=0.0))
    assert run.state.promoted is not None
    assert (run.state.promoted.version, run.state.promoted.reason) == (0, "initial")
    assert decisions(run.evaluate(0.5)) == [("Promoted", 0, "measured")]
    assert run.state.promoted.figures == {METRIC: 0.5}
    assert run.decide() == [], "measured once"


@pytest.mark.parametrize(
    ("bound", "measured", "reason"),
    [
        ({"max_kl": 0.1}, {"policy__kl_ref": 0.2}, "policy/kl_ref 0.2 > 0.1"),
        ({"min_entropy": 0.5}, {"policy__entropy": 0.4}, "policy/entropy 0.4 < 0.5"),
        ({"max_mismatch": 0.02}, {"mismatch__kl": 0.03}, "mismatch/kl 0.03 > 0.02"),
        ({"max_mismatch": 0.02}, {"mismatch__kl": math.nan}, "mismatch/kl is unknown"),
        ({"max_mismatch": 0.02}, {"lag__kl": 0.03}, "lag/kl 0.03 > 0.02"),
        (
            {"max_kl": 0.1, "min_entropy": 0.5},
            {"policy__kl_ref": 0.2, "policy__entropy": 0.1},
            "policy/kl_ref 0.2 > 0.1; policy/entropy 0.1 < 0.5",
        ),
    ],
)
def test_each_bound_refuses_and_at_the_bound_it_passes(
    bound: dict[str, float], measured: dict[str, float], reason: str
) -> None:
    run = Lineage(job(**bound))
    events = run.train(**measured)
    assert isinstance(events[0], BatchTrained)
    assert decisions(events) == [("PromotionRefused", 1, reason)], "in the decision that records the update"
    assert run.state.promoted is not None
    assert run.state.promoted.version == 0
    exact = Lineage(job(max_kl=0.1, min_entropy=1.0, max_mismatch=0.01))
    assert decisions(exact.train()) == [("Promoted", 1, "passed")]


def test_the_held_out_reward_is_compared_with_that_of_the_version_served() -> None:
    run = Lineage(job(max_drop=0.1))
    run.evaluate(0.5)
    assert decisions(run.train()) == [], "not before it is measured"
    assert run.state.promoted is not None
    assert decisions(run.evaluate(0.41)) == [("Promoted", 1, "passed")]
    assert decisions(run.train(0.3)) == [("PromotionRefused", 2, "eval/greedy 0.3 < 0.31")]
    assert run.state.refused is not None
    assert run.state.refused.figures[METRIC] == 0.3


def test_an_evaluation_without_a_score_is_no_floor_and_passes_no_version() -> None:
    run = Lineage(job(max_drop=0.1))
    assert decisions(run.evaluate(math.nan)) == [], "the grader was unavailable"
    assert run.gate.lacks(run.state)
    assert decisions(run.evaluate(0.5)) == [("Promoted", 0, "measured")]
    assert not run.gate.lacks(run.state)
    assert decisions(run.train(math.nan)) == []
    assert decisions(run.evaluate(0.3)) == [("PromotionRefused", 1, "eval/greedy 0.3 < 0.4")]
    old = {METRIC: math.nan}
    assert broken_bounds(run.gate.config, {METRIC: 1.0}, old) == ["eval/greedy of the version served is unknown"]
    assert broken_bounds(run.gate.config, {METRIC: math.inf}, {METRIC: 0.5}) == ["eval/greedy is unknown"]


def test_an_unmeasured_version_is_not_promoted_by_request() -> None:
    run = Lineage(job(max_drop=0.1))
    run.evaluate(0.5)
    run.train()
    run.given(forced=1)
    run.seal()
    assert decisions(run.decide()) == [], "it could never be measured, and nothing be compared with it"
    other = Lineage(job(max_drop=0.1))
    other.evaluate(0.5)
    other.train()
    other.given(forced=1)
    assert decisions(other.decide()) == [("Promoted", 1, "by request")]
    assert other.gate.lacks(other.state)


def test_an_unmeasured_version_may_still_be_refused_for_another_bound() -> None:
    run = Lineage(job(max_drop=0.1, min_entropy=2.0))
    assert decisions(run.train()) == [("PromotionRefused", 1, "policy/entropy 1 < 2")]
    assert decisions(run.evaluate(1.0)) == [], "decided once"


# -- what follows ------------------------------------------------------------------------------------------------------


def test_after_too_many_refusals_nothing_is_drawn_and_training_goes_back() -> None:
    run = Lineage(job(max_lag=2, min_entropy=0.5, patience=2))
    run.given(announced=0)
    run.train()
    run.given(announced=1)
    run.checkpoint(1)
    run.train(policy__entropy=0.1)
    assert run.rollback is None
    run.checkpoint(2)
    events = run.train(policy__entropy=0.2)
    assert decisions(events) == [("PromotionRefused", 3, "policy/entropy 0.2 < 0.5")]
    rollback = run.rollback
    assert rollback is not None
    assert (rollback.number, rollback.operation) == (1, "")
    assert "policy/entropy 0.2 < 0.5" in rollback.reason
    start = start_of(run.run, run.inputs)
    assert (start["checkpoint"]["number"], start["rollback"]["number"]) == (1, 1)
    assert [row[0] for row in start["batches"]] == [2, 3]
    assert start["served"]["version"] == 1

    events = run.fork(2)
    assert isinstance(events[0], LineageForked)
    assert decisions(events) == [("Promoted", 4, "rolled back")]
    state = run.state
    assert (state.updates, state.last_trained, sorted(state.checkpoints)) == (1, 3, [0, 1])
    assert state.checkpoint is not None
    assert state.checkpoint.number == 1, "the newest checkpoint of the lineage"
    assert (state.dropped["rolled_back"], state.balanced()) == (2, True)
    assert run.rollback is None


def test_batches_that_a_rollback_gives_up_are_not_trained_again() -> None:
    run = Lineage(job(max_lag=2, min_entropy=0.5, patience=3))
    run.train()
    run.train(policy__entropy=0.1)
    run.seal()
    given_up = [Draw(1), Draw(2)]
    run.given(rollback=Rollback(1, "by request", "op"))
    events = run.fork(2, rollback=1)
    assert (events[0].redraw, events[0].draws) == (False, given_up)
    state = run.state
    assert (state.open, state.dropped["rolled_back"], state.trained) == ({}, 2, 1)
    statuses = feedback_statuses(decode_events(encode_events(events)), state)
    assert [(one.feedback, one.status, one.reason) for one in statuses] == [
        ("f1", "rejected", "rolled_back"),
        ("f2", "rejected", "rolled_back"),
    ]
    assert {"i1", "i2"} <= state.consumed.keys(), "they stay decided, also on another leader"


def test_batches_that_a_trainer_cannot_repeat_are_drawn_again() -> None:
    run = Lineage(job(max_lag=2, min_entropy=0.5, patience=3))
    run.train()
    events = run.fork(1)
    assert events[0].redraw
    assert set(run.state.open) == {Draw(0, 1)}
    assert [one.status for one in feedback_statuses(events[:1], run.state)] == ["admitted"]


def test_a_rollback_that_is_no_longer_wanted_is_refused() -> None:
    run = Lineage(job(max_lag=2, min_entropy=0.5, patience=1))
    run.train()
    run.train(policy__entropy=0.1)
    assert run.rollback is not None
    run.given(forced=2)
    assert decisions(run.decide()) == [("Promoted", 2, "by request")]
    with pytest.raises(Refusal, match="nobody wants training to go back to batch 1"):
        run.fork(2, rollback=1)
    assert run.state.version == 2


def test_an_unrequested_fork_does_not_serve_a_refused_version() -> None:
    run = Lineage(job(max_lag=3, min_entropy=0.5, patience=4))
    run.train()
    run.train(policy__entropy=0.1)
    run.train(policy__entropy=0.1)
    events = run.fork(3)
    assert decisions(events) == [("PromotionRefused", 4, "policy/entropy is unknown")]
    assert run.state.promoted is not None
    assert run.state.promoted.version == 1
    assert run.rollback is not None
    assert run.rollback.number == 1, "at once: answers of version 1 are too old for version 4"
    events = run.fork(2)
    assert decisions(events) == [("Promoted", 5, "rolled back")], "these are the weights that are served"
    run.train(policy__entropy=0.1)
    events = run.fork(1)
    assert decisions(events) == [("Promoted", 7, "rolled back")], "nothing else is left"


def test_an_unrequested_fork_is_measured_before_it_is_served() -> None:
    run = Lineage(job(max_lag=3, max_drop=0.1, patience=4))
    run.evaluate(0.5)
    run.train()
    run.train()
    assert decisions(run.fork(2)) == []
    measures = Measures(run.run.config, cast(Outbox, Silence()))
    measures.plan = EvaluationPlan(measures.config.evaluation, [SourceSummary("addition", 4, "sums")])
    measures.plan.done.add(run.state.updates)
    assert measures.holds(run.state, run.state.updates), "the plan knows that point, but not these weights"
    assert decisions(run.evaluate(0.5)) == [("Promoted", 3, "passed")]


def test_one_batch_trains_at_a_time_after_the_served_version_is_announced() -> None:
    run = Lineage(job(max_lag=2, min_entropy=0.5, patience=3))
    gate, state = run.gate, run.state
    assert not gate.lets_train(state, -1)
    assert gate.lets_train(state, 0)
    run.seal()
    assert not gate.lets_train(state, 0)
    run.report(kind="trained", batch=1, revision=1, version=1, digest="w1", metrics=MEASURED)
    assert not gate.lets_train(state, 0), "version 1 is promoted, but not announced to engines yet"
    assert gate.lets_train(state, 1)
    run.train(policy__entropy=0.1)
    assert gate.lets_train(state, 1), "version 1 is still served, and its answers are trained"


def test_the_served_version_can_always_be_rebuilt() -> None:
    run = Lineage(job(max_lag=3, min_entropy=0.5, patience=4))
    run.train()
    run.checkpoint(1)
    run.train()
    run.train(policy__entropy=0.1)
    run.checkpoint(3)
    assert run.state.promoted is not None
    assert run.state.promoted.version == 2
    assert run.state.pinned == [0, 1]
    start = start_of(run.run, run.inputs)
    assert start["checkpoint"]["number"] == 1
    assert start["served"] == {"number": 2, "version": 2}
    assert start["rollback"] is None
    assert (earliest_start(run.state, 3), earliest_start(run.state, 0)) == (1, 0)


@pytest.mark.parametrize(("entropy", "low"), [(0.1, 2), (0.9, 4)])
def test_a_checkpoint_releases_the_log_that_no_trainer_has_to_repeat(entropy: float, low: int) -> None:
    """While newer versions are refused, a trainer starts from the last checkpoint before the served version."""
    run = Lineage(job(max_lag=3, min_entropy=0.5, patience=4))
    run.train()
    run.checkpoint(1)
    run.train()
    run.train(policy__entropy=entropy)
    run.run.stored = dict.fromkeys((1, 2, 3), 100)
    run.run.stored_bytes = run.run.config.limits.byte_budget  # others of the job fill the stream
    (event,) = [event for event in run.checkpoint(3) if isinstance(event, Checkpointed)]
    assert event.low_seq == low


def test_the_condition_says_what_is_served_and_why_the_newest_is_not() -> None:
    run = Lineage(job(max_drop=0.1))
    assert run.gate.fact(run.state)[:2] == ("True", "Initial")
    run.evaluate(0.5)
    run.train()
    status, reason, message = run.gate.fact(run.state)
    assert (status, reason) == ("Unknown", "NotMeasured")
    run.evaluate(0.1)
    status, reason, message = run.gate.fact(run.state)
    assert (status, reason) == ("False", "BoundBroken")
    assert message == "version 1: eval/greedy 0.1 < 0.4; version 0 is served on"


def test_an_audit_finds_a_version_that_should_not_have_been_served() -> None:
    config = job(min_entropy=0.5, max_drop=0.1).online.promotion
    epoch: dict[str, Any] = {"writer_epoch": 1, "time": NOW}

    def served(version: int, reason: str, **figures: float) -> Promoted:
        return Promoted(**epoch, version=version, number=version, digest="d", reason=reason, figures=figures)

    good = {"policy/entropy": 0.6, METRIC: 0.5}
    assert not flaws_of_promotions([[served(0, "initial")], [served(1, "passed", **good)]], config)
    low = served(2, "passed", **{**good, METRIC: 0.3})
    assert flaws_of_promotions([[served(1, "passed", **good)], [low]], config) == [
        "version 2 was served: eval/greedy 0.3 < 0.4"
    ]
    assert not flaws_of_promotions([[served(1, "by request", **{"policy/entropy": 0.1})]], config)
    trained = BatchTrained(
        **epoch, number=1, revision=1, version=1, digest="d", trainer_epoch=1, figures={"policy/entropy": 0.1}
    )
    (flaw,) = flaws_of_promotions([[trained, served(1, "passed", **good)]], config)
    assert "not those of its update" in flaw


# -- desired state -----------------------------------------------------------------------------------------------------


def desired_state(*operations: Operation) -> DesiredState:
    return DesiredState(JobRecord(id="j", name="n", created_at=datetime.now(UTC), spec={}, operations=list(operations)))


def operation(kind: Any, **args: int) -> Operation:
    return Operation(id=f"op-{kind}", kind=kind, args=args, created_at=datetime.now(UTC))


def test_a_refused_version_can_be_promoted_by_request() -> None:
    run = Lineage(job(max_lag=2, min_entropy=0.5, patience=2))
    run.train(policy__entropy=0.1)
    asked = desired_state(operation("promote", version=1))
    run.inputs = asked.inputs(run.run, run.inputs)
    assert decisions(run.decide()) == [("Promoted", 1, "by request")]
    (done,) = asked.settle(run.run)
    assert (done.state, done.result) == ("succeeded", {"version": 1})
    (late,) = desired_state(operation("promote", version=0)).settle(run.run)
    assert (late.state, late.message) == ("failed", "only the newest version can be promoted, which is 1 by now")


def test_a_rollback_by_request_ends_with_its_fork() -> None:
    run = Lineage(job(min_entropy=0.5))
    run.train()
    run.checkpoint(1)
    run.train()
    asked = desired_state(operation("rollback", checkpoint=1))
    run.inputs = asked.inputs(run.run, run.inputs)
    assert run.rollback is not None
    assert run.rollback.number == 1
    assert asked.settle(run.run) == []
    events = run.fork(2)
    assert events[0].operation == "op-rollback"
    assert decisions(events) == [("Promoted", 3, "rolled back")]
    (done,) = asked.settle(run.run)
    assert (done.state, done.result) == ("succeeded", {"version": 3})
    run.inputs = asked.inputs(run.run, run.inputs)
    assert run.rollback is None


def test_a_rollback_to_an_unreadable_checkpoint_fails_and_the_job_continues() -> None:
    run = Lineage(job(min_entropy=0.5))
    run.train()
    asked = desired_state(operation("rollback", checkpoint=0))
    run.inputs = asked.inputs(run.run, run.inputs)
    run.run.give_up_rollback(run.inputs, "no file")
    assert run.rollback is None
    (done,) = asked.settle(run.run)
    assert (done.state, done.message) == ("failed", "no file")
    run.inputs = asked.inputs(run.run, run.inputs)
    assert run.rollback is None


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [(7, "there is no checkpoint 7 to go back to; there are: 0, 2"), (2, "nothing was trained after checkpoint 2")],
)
def test_an_impossible_rollback_is_refused(checkpoint: int, reason: str) -> None:
    run = Lineage(job(min_entropy=0.5))
    run.train()
    run.train()
    run.checkpoint(2)
    asked = desired_state(operation("rollback", checkpoint=checkpoint))
    run.inputs = asked.inputs(run.run, run.inputs)
    assert run.rollback is None
    (done,) = asked.settle(run.run)
    assert (done.state, done.message) == ("failed", reason)


def test_a_rollback_past_the_log_is_refused() -> None:
    run = Lineage(job(min_entropy=0.5))
    run.train()
    run.train()
    run.run.commit(
        [
            Checkpointed(
                writer_epoch=1, time=NOW, number=2, version=2, digest="w2", path="c2", trainer_epoch=1, low_seq=2,
            )
        ]
    )  # fmt: skip
    (done,) = desired_state(operation("rollback", checkpoint=0)).settle(run.run)
    assert "batch 1, trained after checkpoint 0, is not in the log any more" in done.message


# -- job files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"online": {"promotion": {}}}, "give max_drop, max_kl, min_entropy, max_mismatch or canary"),
        ({"online": {"promotion": {"max_kl": 1.0}}}, "Set algorithm.kl"),
        ({"online": {"promotion": {"max_drop": 0.1}}}, "no evaluation of this job measures 'eval/greedy'"),
        ({"online": {"promotion": {"min_entropy": 1.0, "patience": 3}}}, "need train.max_lag >= 2"),
    ],
)
def test_a_gate_that_could_not_decide_is_refused_at_load(changes: dict[str, Any], problem: str) -> None:
    spec = {"kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"}, **changes}
    with pytest.raises(ConfigError, match=problem):
        OnlineJob.parse(spec)


def test_versions_that_are_compared_must_be_measured() -> None:
    spec = job(max_drop=0.1).model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ConfigError, match=r"set evaluation\.every"):
        OnlineJob.parse({**spec, "evaluation": {"num_prompts": 4}})
    with pytest.raises(ConfigError, match=r"train\.max_lag >= 3"):
        OnlineJob.parse({**spec, "evaluation": {"every": 4}})


def test_an_evaluation_that_misses_prompts_decides_nothing_and_is_repeated() -> None:
    measures = Measures(job(max_drop=0.1), cast(Outbox, Silence()))
    state = LedgerState()
    measures.plan = EvaluationPlan(measures.config.evaluation, [SourceSummary("addition", 4, "sums")])
    for answered in (2, 4):
        assert len(measures.begin_evaluation(state, final=False, now=NOW, epoch=1)) == 4
        for ordinal in range(answered):
            assert measures.plan.current is not None
            measures.plan.current.take(
                EvalResult(version=0, ordinal=ordinal, rewards=[1.0], failed=[False], greedy=[True])
            )
        assert measures.end_evaluation(state, NOW + 1)
        assert (measures.evaluated is not None) is (answered == 4)
    assert measures.begin_evaluation(state, final=False, now=NOW, epoch=1) == []


def test_an_evaluation_without_a_score_is_repeated_after_a_while() -> None:
    measures = Measures(job(max_drop=0.1), cast(Outbox, Silence()))
    state = LedgerState()
    measures.plan = EvaluationPlan(measures.config.evaluation, [SourceSummary("addition", 1, "sums")])
    measures.begin_evaluation(state, final=False, now=NOW, epoch=1)
    assert measures.plan.current is not None
    measures.plan.current.take(EvalResult(version=0, ordinal=0, rewards=[0.0], failed=[True], greedy=[True]))
    assert measures.end_evaluation(state, NOW)
    assert measures.evaluated is None
    assert measures.begin_evaluation(state, final=False, now=NOW, epoch=1) == []
    assert measures.holds(state, 0)
    assert measures.begin_evaluation(state, final=False, now=NOW + 60, epoch=1)


def test_the_version_that_a_rollback_serves_is_measured_by_any_leader() -> None:
    run = Lineage(job(max_lag=2, max_drop=0.1))
    run.evaluate(0.5)
    run.train(0.5)
    run.checkpoint(1)
    run.train(0.6)
    rows = [
        {"kind": "eval", "step": n, "batch": n, "version": n, "values": {METRIC: 0.5}} for n in range(3)
    ]  # as they were written before
    run.given(rollback=Rollback(1, "by request", "op"))
    assert decisions(run.fork(2, rollback=1)) == [("Promoted", 3, "rolled back")]
    run.given(rollback=None)
    assert run.state.promoted is not None
    assert run.state.promoted.figures == {}
    other = Measures(run.run.config, cast(Outbox, Silence()))
    other.begin(run.state, held_out=[SourceSummary("addition", 4, "sums")], now=NOW)
    other.resume(rows, run.state)
    assert other.holds(run.state, run.state.updates)
    assert other.begin_evaluation(run.state, final=False, now=NOW, epoch=1)


class Silence:
    """An outbox that discards everything."""

    def metrics(self, *row: Any, **more: Any) -> None: ...

    def event(self, *row: Any, **more: Any) -> None: ...
