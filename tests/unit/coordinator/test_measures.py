"""What a leader takes up of the rows that others wrote."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from penstock.services.coordinator.ledger import LedgerState
from penstock.services.coordinator.measures import Measures
from penstock.services.coordinator.outbox import Outbox
from penstock.shared.config.job import JobConfig

JOB = {
    "name": "measures",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}, "eval": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "evaluation": {"every": 2},
    "early_stop": {"metric": "reward/mean", "goal": 0.9},
    "checkpoint": {"keep_best": {"metric": "eval/greedy"}},
    "train": {"batch_size": 16, "max_updates": 50},
}


def row(kind: str, step: int, *, batch: int | None = None, **values: float) -> dict[str, Any]:
    """A row as it comes back from the stream; before any fork the batch is the step."""
    shown = {name.replace("_", "/"): value for name, value in values.items()}
    batch = step if batch is None else batch
    text = msgspec.json.encode({"kind": kind, "step": step, "batch": batch, "version": step, "values": shown})
    return cast(dict[str, Any], msgspec.json.decode(text))


def test_another_leader_knows_points_goals_and_totals_and_survives_what_was_not_finite() -> None:
    measures = Measures(JobConfig.parse(JOB), cast(Outbox, None))
    rows = [
        row("eval", 0, eval_greedy=0.1),
        row("train", 1, reward_mean=0.5, grad_norm=float("inf")),
        row("train", 2, reward_mean=float("nan")),
        row("eval", 2, eval_greedy=0.4),
        row("train", 3, reward_mean=0.7),
    ]
    measures.recall(rows, LedgerState(last_trained=3), num_eval=10, now=0.0)
    assert measures.plan.done == {0, 2}
    assert measures.reward == 0.7
    assert measures.goals.stop_reason == ""
    assert measures.goals.wanted(LedgerState(last_trained=3)) == "new best eval/greedy 0.4 after update 2"
    measures.recall([*rows, row("train", 4, reward_mean=0.95)], LedgerState(last_trained=4), num_eval=10, now=0.0)
    assert "reached 0.95" in measures.goals.stop_reason


FORKED = LedgerState(last_trained=8, updates=6, version=9, rolled_back=((6, 7),))
"""Batches 6 and 7 were rolled back; batch 8 is the sixth update of the lineage."""


def test_what_was_measured_of_rolled_back_batches_decides_nothing_on_any_leader() -> None:
    spec = {**JOB, "checkpoint": {"keep_best": {"metric": "reward/mean"}}}
    rows = [row("train", n, reward_mean=value) for n, value in ((5, 0.2), (6, 0.5), (7, 0.95))]
    rows += [row("eval", 6, eval_greedy=0.9), row("train", 8, reward_mean=0.3)]
    other = Measures(JobConfig.parse(spec), cast(Outbox, None))
    other.recall(rows, FORKED, num_eval=10, now=0.0)
    live = Measures(JobConfig.parse(spec), cast(Outbox, None))
    live.recall(rows[:4], LedgerState(last_trained=7, updates=7), num_eval=10, now=0.0)
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
    measures.recall([row("eval", 5, batch=5, eval_greedy=0.4)], state, num_eval=10, now=0.0)
    assert measures.goals.wanted(state) == "new best eval/greedy 0.4 after update 5"
    assert FORKED.newest_batch == 8
