"""Measures of a run: disproofs of log-probs, and a new leader that resumes from the rows of earlier ones."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from penstock.services.coordinator.leader.measures import Measures
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.training.gate import Candidate, Verdict
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_training
from penstock.shared.data.check import SourceSummary
from penstock.shared.protocol.events import BatchSealed, BatchTrained, SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import EvalResult, Report
from penstock.shared.protocol.trajectory import GroupHeader

JOB: dict[str, Any] = {
    "name": "measures",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}, "eval": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "evaluation": {"every": 2},
    "early_stop": {"metric": "reward/mean", "goal": 0.9},
    "checkpoint": {"keep_best": {"metric": "eval/greedy"}},
    "train": {"batch_size": 16, "max_updates": 50},
}


HELD_OUT = [SourceSummary("addition", 10, "sums")]


def row(kind: str, step: int, *, batch: int | None = None, **values: float) -> dict[str, Any]:
    """Return a row of metrics as a leader reads it from the stream; ``batch`` is ``step`` unless there was a fork."""
    shown = {name.replace("_", "/"): value for name, value in values.items()}
    batch = step if batch is None else batch
    text = msgspec.json.encode({"kind": kind, "step": step, "batch": batch, "version": step, "values": shown})
    return cast(dict[str, Any], msgspec.json.decode(text))


def trained(number: int, **metrics: float) -> Report:
    values = {name.replace("_", "/"): value for name, value in metrics.items()}
    return Report(kind="trained", epoch=1, batch=number, revision=1, version=number, digest="w", metrics=values)


def measures_with_lag(max_lag: int) -> Measures:
    measures = Measures(JobConfig.parse(JOB | {"train": JOB["train"] | {"max_lag": max_lag}}), cast(Outbox, None))
    measures.begin(LedgerState(), held_out=HELD_OUT, now=0.0)
    return measures


@pytest.mark.parametrize("max_lag", [1, 3])
def test_one_large_update_of_the_policy_is_no_disproof(max_lag: int) -> None:
    """At most ``max_lag`` batches in a row were sampled by versions before the large update, and differ."""
    measures = measures_with_lag(max_lag)
    for start in (1, 20):
        for number in range(start, start + max_lag):
            assert measures.disproof(trained(number, lag_logprob=1.5)) == ""
        assert measures.disproof(trained(start + max_lag, lag_logprob=0.9)) == ""


@pytest.mark.parametrize("metrics", [{"mismatch_logprob": 0.0, "lag_logprob": 2.0}, {"lag_logprob": float("nan")}])
def test_tokens_sampled_by_other_weights_than_recorded_are_a_disproof(metrics: dict[str, float]) -> None:
    measures = measures_with_lag(2)
    for number in (1, 2):
        assert measures.disproof(trained(number, **metrics)) == ""
    assert measures.disproof(trained(3)) == "", "an update without such tokens says nothing"
    assert "update 4: sampler and trainer differ by" in measures.disproof(trained(4, **metrics))
    assert measures.disproof(trained(5, mismatch_logprob=0.1)) == ""
    assert "update 6" in measures.disproof(trained(6, **metrics)), "it did not get better"
    assert measures.disproof(trained(7, lag_logprob=0.1)) == ""


def test_another_leader_continues_the_count_of_updates_that_differ() -> None:
    measures = measures_with_lag(1)
    measures.resume([row("train", 1, lag_logprob=1.5)], LedgerState(last_trained=1))
    assert "update 2" in measures.disproof(trained(2, lag_logprob=1.5))
    measures.roll_back(LedgerState(last_trained=1))
    assert measures.disproof(trained(2, lag_logprob=1.5)) == ""


def test_a_mismatch_at_one_version_is_a_disproof_at_once() -> None:
    assert "differ by 1.20 nats" in measures_with_lag(3).disproof(trained(1, mismatch_logprob=1.2, lag_logprob=0.1))


def test_another_leader_knows_points_goals_and_totals() -> None:
    measures = Measures(JobConfig.parse(JOB), cast(Outbox, None))
    rows = [
        row("eval", 0, eval_greedy=0.1),
        row("train", 1, reward_mean=0.5, grad_norm=float("inf")),
        row("train", 2, reward_mean=float("nan")),
        row("eval", 2, eval_greedy=0.4),
        row("train", 3, reward_mean=0.7),
    ]
    measures.begin(LedgerState(last_trained=3), held_out=HELD_OUT, now=0.0)
    measures.resume(rows, LedgerState(last_trained=3))
    assert measures.plan.done == {0, 2}
    assert measures.reward == 0.7
    assert measures.goals.stop_reason == ""
    assert measures.goals.wanted(LedgerState(last_trained=3)) == "new best eval/greedy 0.4 after update 2"
    measures.begin(LedgerState(last_trained=4), held_out=HELD_OUT, now=0.0)
    measures.resume([*rows, row("train", 4, reward_mean=0.95)], LedgerState(last_trained=4))
    assert "reached 0.95" in measures.goals.stop_reason


def test_an_update_of_several_sources_reports_the_reward_of_each() -> None:
    hard = {"type": "addition", "digits": 2, "name": "hard"}
    spec = {**JOB, "data": {**JOB["data"], "train": [{"type": "addition"}, hard]}}
    measures = Measures(JobConfig.parse(spec), cast(Outbox, None))
    measures.begin(LedgerState(), held_out=[], now=0.0)
    measures.resume([], LedgerState())
    headers = [header(0, "hard", [1.0, 0.0]), header(1, "hard", [1.0, 1.0]), header(2, "addition", [0.0, 0.25])]
    candidates = {found.draw: Candidate(i, found, Verdict.ACCEPT) for i, found in enumerate(headers)}
    groups = [SealedGroup(draw, "a", 1, "d", 0, 0, [], 2, "w") for draw in (Draw(0), Draw(1))]
    sealed = BatchSealed(writer_epoch=1, time=0.0, number=1, revision=1, start_version=0, update_index=0, groups=groups)
    report = Report(kind="trained", epoch=1, batch=1, version=1, metrics={"reward/mean": 0.75})
    values = measures.values_of(report, sealed, candidates, 1.0, {"online/waiting": 2.0})
    assert (values["reward/mean"], values["online/waiting"]) == (0.75, 2.0)
    assert (values["reward/mean/hard"], values["groups/count/hard"], values["groups/count/addition"]) == (0.75, 2, 0)
    assert "reward/mean/addition" not in values


def header(ordinal: int, source: str, rewards: list[float]) -> GroupHeader:
    return GroupHeader(
        draw=Draw(ordinal), attempt="a", epoch=1, digest="d", nbytes=1, prompt_tokens=2, lengths=[1] * len(rewards),
        rewards=rewards, failed=[False] * len(rewards), truncated=[False] * len(rewards), finite=True, min_version=0,
        max_version=0, worker="w", source=source,
    )  # fmt: skip


FORKED = LedgerState(last_trained=8, updates=6, version=9, rolled_back=((6, 7),))
"""Batches 6 and 7 were rolled back; batch 8 is the sixth update of the lineage."""


def test_metrics_of_rolled_back_batches_decide_nothing_on_any_leader() -> None:
    spec = {**JOB, "checkpoint": {"keep_best": {"metric": "reward/mean"}}}
    rows = [row("train", n, reward_mean=value) for n, value in ((5, 0.2), (6, 0.5), (7, 0.95))]
    rows += [row("eval", 6, eval_greedy=0.9), row("train", 8, reward_mean=0.3)]
    other = Measures(JobConfig.parse(spec), cast(Outbox, None))
    other.begin(FORKED, held_out=HELD_OUT, now=0.0)
    other.resume(rows, FORKED)
    live = Measures(JobConfig.parse(spec), cast(Outbox, None))
    live.begin(LedgerState(last_trained=7, updates=7), held_out=HELD_OUT, now=0.0)
    live.resume(rows[:4], LedgerState(last_trained=7, updates=7))
    assert live.goals.stop_reason
    assert live.plan.done == {6}
    live.roll_back(LedgerState(last_trained=7, updates=5, version=8, rolled_back=((6, 7),)))
    live.goals.take({"reward/mean": 0.3}, 8)
    for measures in (live, other):
        assert measures.goals.wanted(FORKED) == "new best reward/mean 0.3 after update 8"
        assert measures.goals.stop_reason == ""
        assert measures.plan.done == set()


def test_an_evaluation_after_a_fork_is_of_the_newest_batch_of_the_lineage() -> None:
    state = LedgerState(last_trained=7, updates=5, version=8, rolled_back=((6, 7),))
    assert state.newest_batch == 5
    measures = Measures(JobConfig.parse(JOB), cast(Outbox, None))
    measures.begin(state, held_out=HELD_OUT, now=0.0)
    measures.resume([row("eval", 5, batch=5, eval_greedy=0.4)], state)
    assert measures.goals.wanted(state) == "new best eval/greedy 0.4 after update 5"
    assert FORKED.newest_batch == 8


class Rows:
    """An outbox that keeps the values of the rows of METRICS and the messages of the events."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.events: list[str] = []

    def metrics(self, kind: str, step: int, version: int, values: dict[str, float], **more: Any) -> None:
        self.values.append(values)

    def event(self, level: str, type: str, message: str, **more: Any) -> None:
        self.events.append(message)


def measures_of_episodes(environment: dict[str, Any], metric: str) -> tuple[Measures, Rows, LedgerState]:
    """Return measures of a job that keeps the best checkpoint by ``metric``, what they write, and the ledger's state
    after one update; ``environment`` describes the simulator."""
    job = {
        "kind": "embodied", "name": "pole", "environment": {"task": "CartPole-v1", "horizon": 9},
        "algorithm": {"type": "ppo"}, "train": {"batch_size": 8, "max_updates": 9}, "evaluation": {"episodes": 1},
        "checkpoint": {"keep_best": {"metric": metric}},
    }  # fmt: skip
    rows, state = Rows(), LedgerState(last_trained=1, updates=1, environment=environment)
    measures = Measures(parse_training(job), cast(Outbox, rows))
    measures.begin(state, held_out=[SourceSummary("episodes", 1, "starts")], now=0.0)
    return measures, rows, state


def update_of(rate: float) -> BatchTrained:
    return BatchTrained(
        writer_epoch=1, trainer_epoch=1, time=1.0, number=1, revision=0, version=1, digest="d",
        metrics={"reward/mean": 3.0, "success/rate": rate},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "rate", "shown"),
    [({"has_success": True}, 0.0, True), ({"has_success": False}, 0.0, False), ({"has_success": False}, 0.25, True)],
)
@pytest.mark.parametrize("is_restored", [False, True])
def test_a_simulator_that_reports_no_success_has_no_rate_of_zero(
    environment: dict[str, Any], rate: float, shown: bool, is_restored: bool
) -> None:
    """Neither the row of an update nor the choice of the best checkpoint has the rate, on any leader."""
    measures, rows, state = measures_of_episodes(environment, "success/rate")
    if is_restored:
        measures.restore(update_of(rate), 5, state)
    else:
        measures.after_update(update_of(rate), 5, state)
        assert rows.events == ([] if shown else ["'success/rate' is followed but no episode succeeded yet"])
    assert [values.get("success/rate") for values in rows.values] == [rate if shown else None]
    best = f"new best success/rate {rate:.4g} after update 1" if shown else ""
    assert measures.goals.wanted(state) == best


@pytest.mark.parametrize(
    ("environment", "rate", "shown"),
    [
        ({"has_success": True}, 0.0, True),
        ({"has_success": False}, 0.0, False),
        ({"has_success": False}, 1.0, True),
        ({"has_success": False, "held_out_success": True}, 0.0, True),
        ({"has_success": True, "held_out_success": False}, 0.0, False),
    ],
)
def test_held_out_success_is_that_of_the_simulator_that_plays_them(
    environment: dict[str, Any], rate: float, shown: bool
) -> None:
    """Older ledgers describe only the simulator of training."""
    measures, rows, state = measures_of_episodes(environment, "eval/success")
    measures.plan.start(1, 1, now=2.0, deadline=9.0, epoch=1)
    assert measures.plan.current is not None
    parts = {"return": [3.0], "success": [rate], "length": [3.0]}
    measures.plan.current.take(
        EvalResult(version=1, ordinal=0, rewards=[3.0], failed=[False], greedy=[True], parts=parts)
    )
    assert measures.end_evaluation(state, 3.0)
    (values,) = rows.values
    assert (values["eval/return"], values.get("eval/success")) == (3.0, rate if shown else None)
    (message,) = rows.events
    assert ("eval/success" in message) is shown
    assert bool(measures.goals.wanted(state)) is shown
