"""When a run stops early, and which checkpoint is the best."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from penstock.services.coordinator.leader.summary import summary_of
from penstock.services.coordinator.submission import plan_job
from penstock.services.coordinator.training.goals import EarlyStop, Goals
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.goals import EarlyStopConfig, KeepBestConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.events import Checkpointed, LineageForked

JOB = {
    "name": "goals",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 5},
}


def stops_after(values: Iterable[float], **config: object) -> tuple[int, str]:
    """Return after how many of ``values`` a run stops (0: never), and the reason."""
    stop = EarlyStop(EarlyStopConfig.parse(config))
    for count, value in enumerate(values, 1):
        stop.take(value)
        if stop.reason:
            return count, stop.reason
    return 0, ""


def test_a_goal_is_reached_by_the_mean_of_a_full_window() -> None:
    assert stops_after([1.0, 0.0, 1.0, 1.0], goal=0.9, window=2) == (4, "reward/mean reached 1, the goal is 0.9")
    assert stops_after([5.0, 3.0, 1.0], metric="loss", mode="min", goal=3.0)[0] == 2
    assert stops_after([0.89] * 50, goal=0.9)[0] == 0


def test_patience_counts_values_without_a_new_best() -> None:
    assert stops_after([0.1, 0.5, 0.5, 0.4, 0.6], patience=3)[0] == 0
    count, reason = stops_after([0.1, 0.5, 0.5, 0.4, 0.5], patience=3)
    assert (count, reason) == (5, "reward/mean had no new best in 3 values; the best is 0.5")
    assert stops_after([0.1, 0.15, 0.2, 0.25], patience=2, min_delta=0.1)[0] == 3
    assert stops_after([0.5, 0.4, 0.3, 0.35, 0.3], mode="min", patience=2)[0] == 5


@pytest.mark.parametrize("wrong", [{}, {"goal": 1.0, "min_delta": 0.1}])
def test_a_rule_that_could_not_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"goal or patience|only for patience"):
        EarlyStopConfig.parse(wrong)


@pytest.mark.parametrize(
    "section",
    [
        {"early_stop": {"metric": "eval/avg@4", "goal": 1.0}},
        {"checkpoint": {"keep_best": {"metric": "eval/greedy"}}, "evaluation": {"greedy": False, "samples": 4}},
    ],
)
def test_a_metric_that_no_evaluation_measures_is_refused(section: dict[str, object]) -> None:
    data = {"train": {"type": "addition"}, "eval": {"type": "addition"}}
    with pytest.raises(ConfigError, match="no evaluation of this job measures 'eval/"):
        JobConfig.parse({**JOB, "data": data, **section})


def test_an_evaluation_of_several_sources_measures_each() -> None:
    hard = {"type": "addition", "digits": 2, "name": "hard"}
    job = {**JOB, "checkpoint": {"keep_best": {"metric": "eval/greedy/hard"}}}
    JobConfig.parse({**job, "data": {"train": {"type": "addition"}, "eval": [{"type": "addition"}, hard]}})
    with pytest.raises(ConfigError, match=r"measures 'eval/greedy/hard'; they measure eval/greedy$"):
        JobConfig.parse({**job, "data": {"train": {"type": "addition"}, "eval": hard}})


async def test_a_goal_on_a_source_that_no_evaluation_reaches_is_refused() -> None:
    sources = [{"type": "addition", "num_rows": 128}, {"type": "addition", "num_rows": 8, "name": "greedy"}]
    job = {**JOB, "data": {"train": {"type": "addition"}, "eval": sources}}

    async def plan(metric: str, num_prompts: int) -> list[str]:
        rules = {"checkpoint": {"keep_best": {"metric": metric}}, "evaluation": {"num_prompts": num_prompts}}
        found = await plan_job(
            JobConfig.parse({**job, **rules}), [], ServiceSettings(experience_bytes=1 << 40), stores_parts=True
        )
        return list(found["data"]["notes"])

    note = "data.eval: evaluation.num_prompts (128) ends before source 'greedy'"
    assert await plan("eval/greedy", 128) == [note]
    assert await plan("eval/greedy/greedy", 129) == []
    with pytest.raises(ConfigError, match="'eval/greedy/greedy' is never measured: raise it, or put that source first"):
        await plan("eval/greedy/greedy", 128)


def test_evaluations_without_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.every: there is nothing to evaluate on"):
        JobConfig.parse({**JOB, "evaluation": {"every": 10}})
    assert not JobConfig.parse(JOB).evaluation.every, "version 0 and the last one are where there are prompts"


def ledger(last_trained: int, *checkpoints: int) -> LedgerState:
    state = LedgerState(last_trained=last_trained, version=last_trained, updates=last_trained)
    for number in checkpoints:
        state.apply(
            Checkpointed(
                writer_epoch=1, time=0.0, number=number, version=number, digest="d", path=f"/c/{number}",
                trainer_epoch=1, low_seq=0,
            )
        )  # fmt: skip
    return state


def best_of(metric: str = "eval/greedy", mode: str = "max") -> Goals:
    goals = Goals(None, KeepBestConfig.parse({"metric": metric, "mode": mode}))
    goals.begin(None)
    return goals


def commit(goals: Goals, state: LedgerState) -> int | None:
    """Apply the event that is due, if any, to ``state``; return the number of the checkpoint that it names."""
    events = goals.mark(state, writer_epoch=1, now=0.0)
    for event in events:
        state.apply(event)
    return events[0].number if events else None


def test_a_new_best_requests_a_checkpoint_delays_the_next_batch_and_is_named_once() -> None:
    goals, state = best_of(), ledger(4, 0)
    assert not goals.holds(state)
    goals.take({"eval/greedy": 0.5}, 4)
    assert goals.wanted(state) == "new best eval/greedy 0.5 after update 4"
    assert goals.holds(state)
    assert commit(goals, state) is None  # checkpoint 0 does not hold update 4
    state = ledger(4, 0, 4)
    assert not goals.holds(state)
    assert commit(goals, state) == 4
    assert commit(goals, state) is None
    assert state.pinned == [0, 4]
    goals.take({"eval/greedy": 0.5}, 6)
    assert not goals.wanted(state)


def test_a_value_that_is_not_finite_or_not_better_is_no_new_best() -> None:
    goals, state = best_of("loss", "min"), ledger(5, 0)
    for step, value in enumerate([3.0, math.nan, 4.0, -math.inf], 1):
        goals.take({"loss": value, "reward/mean": 9.0}, step)
    assert goals.wanted(state) == "new best loss 3 after update 1"
    assert not goals.holds(state)  # a metric of updates delays no batch


def test_the_first_checkpoint_after_the_measurement_is_the_best_one() -> None:
    goals, state = best_of("reward/mean"), ledger(9, 0, 5, 9)
    goals.take({"reward/mean": 1.0}, 4)
    assert commit(goals, state) == 5
    summary = summary_of(state)["best_checkpoint"]
    assert summary == {"number": 5, "metric": "reward/mean", "value": 1.0, "step": 4, "path": "/c/5"}


def test_another_leader_continues_from_the_ledger_and_the_rows() -> None:
    goals, state = best_of(), ledger(4, 0, 4)
    goals.take({"eval/greedy": 0.5}, 4)
    commit(goals, state)
    again = Goals(None, KeepBestConfig(metric="eval/greedy"))
    again.begin(state.best)
    again.take({"eval/greedy": 0.5}, 4)  # the rows are read again
    assert commit(again, state) is None
    again.take({"eval/greedy": 0.4}, 8)
    assert not again.wanted(state)


def test_a_fork_rolls_back_the_best_checkpoint() -> None:
    goals, state = best_of(), ledger(4, 0, 4)
    goals.take({"eval/greedy": 0.5}, 4)
    commit(goals, state)
    state.apply(
        LineageForked(
            writer_epoch=1, time=0.0, from_batch=3, version=9, digest="f", reason="gone", trainer_epoch=2,
            min_version=9, deadline=0.0,
        )
    )  # fmt: skip
    assert state.best is None
    goals.roll_back(state)
    assert not goals.wanted(state)


def test_a_followed_metric_that_does_not_exist_is_reported() -> None:
    goals = Goals(EarlyStopConfig(metric="reward/men", goal=1.0), KeepBestConfig(metric="eval/greedy"))
    goals.begin(None)
    assert goals.unknown({"reward/mean": 1.0}) == ["reward/men"]


def test_an_evaluation_that_misses_prompts_decides_nothing() -> None:
    goals = Goals(EarlyStopConfig(metric="eval/greedy", goal=0.9), KeepBestConfig(metric="eval/greedy"))
    goals.begin(None)
    state = ledger(4, 0)
    goals.take({"eval/greedy": 1.0, "eval/missing": 3.0}, 4)
    assert not goals.wanted(state)
    assert not goals.stop_reason
    goals.take({"eval/greedy": 1.0, "eval/missing": 0.0}, 4)
    assert goals.wanted(state)
    assert goals.stop_reason
