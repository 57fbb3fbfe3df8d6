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


def row(kind: str, step: int, **values: float) -> dict[str, Any]:
    """A row as it comes back from the stream."""
    text = msgspec.json.encode(
        {"kind": kind, "step": step, "values": {k.replace("_", "/"): v for k, v in values.items()}}
    )
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
