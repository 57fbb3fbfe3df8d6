"""From a metric to a model: groups without signal are replaced, the run stops early and keeps its best checkpoint, a
user downloads that checkpoint over HTTP, and an evaluation job measures it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.shared.errors import ConfigError, Conflict
from penstock.shared.protocol.events import Checkpointed, Finished

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

EASY = {"type": "addition", "digits": 1, "num_rows": 4}
HARD = {"type": "addition", "digits": 2, "num_rows": 2, "name": "hard"}


def evaluation(model: str, job: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "name": "measure",
        "model": {"path": model},
        "data": {"eval": [EASY, HARD], "prompt": {"max_tokens": 8}},
        "reward": job["reward"],
        "sampling": {"max_new_tokens": 6},
        "evaluation": {"num_prompts": 6, "samples": 2, "pass_k": [2]},
        "limits": {"byte_budget": 1 << 20, "timeout_s": 60},
    }


@pytest.mark.long
def test_from_a_metric_to_a_measured_checkpoint(stack: Any, make_job: Any, tmp_path: Path) -> None:
    job = stack.submit(
        data={"train": [{**EASY, "weight": 3}, HARD], "prompt": {"max_tokens": 8}},
        algorithm={"group_size": 2, "dynamic_sampling": {"max_resampled": 2.0}},
        train={"batch_size": 8, "max_updates": 60, "max_lag": 1, "draw_timeout_s": 30},
        early_stop={"metric": "reward/mean", "window": 6, "goal": -1.0},
        # smallest after the first update: that checkpoint must outlive `keep`
        checkpoint={"every": 2, "keep": 1, "keep_best": {"metric": "tokens_total/generated", "mode": "min"}},
    )
    record = stack.finish(job)
    status = record.status
    assert status.phase == "succeeded"
    assert "reward/mean reached" in status.message
    assert 6 <= status.step < 20

    audit = stack.check_audit(job)
    dropped = audit["equation"]["dropped"]["no_signal"]
    assert dropped > 0
    series = stack.client.metrics(job)["series"]
    assert sum(value or 0 for value in series["dropped/no_signal"]) <= dropped
    assert max(value or 0 for value in series["resample_ratio"]) > 0
    assert 0 < series["goodput"][-1] <= 1

    check_sources(series, groups_per_batch=4)
    hard = stack.client.samples(job, env="hard", limit=100)
    assert {(row.env, len(row.prompt) > 4) for row in hard} <= {("hard", True), ("hard", False)}
    assert any(len(row.prompt) > 4 for row in hard)
    assert all(len(row.prompt) == 4 for row in stack.client.samples(job, env="addition", limit=100))

    best = status.best_checkpoint["number"]
    events = stack.ledger(job)
    assert isinstance(events[-1], Finished)
    summary = events[-1].summary["best_checkpoint"]  # relative to the data directory, so that it can be moved
    assert {**summary, "path": str(stack.directory / "data" / summary["path"])} == status.best_checkpoint
    taken = {event.number: event.reason for event in events if isinstance(event, Checkpointed)}
    assert taken[0] == "initial"
    assert taken[best].startswith("new best tokens_total/generated")

    rows = {row["number"]: row for row in stack.client.checkpoints(job)}
    available = {number for number, row in rows.items() if row["available"]}
    assert available >= {0, best, status.step}
    assert len(available) <= 4, "the job may end before the last clean-up, but not before the previous one"
    assert len(rows) > 3, "retention had nothing to delete"
    assert rows[best]["best"]
    assert rows[status.step]["final"]
    stack.client.download_checkpoint(job, best, tmp_path / "model")
    assert {f"{p.relative_to(tmp_path / 'model')}" for p in (tmp_path / "model").rglob("*") if p.is_file()} == {
        file["name"] for file in rows[best]["files"]
    }

    measured = stack.client.submit(evaluation(f"job:{job}@best", make_job())).id
    end = stack.finish(measured).status
    assert end.phase == "succeeded", end.message
    assert (end.step, end.total_steps) == (6, 6)
    values = stack.client.metrics(measured)["series"]
    found = stack.client.samples(measured, limit=100)
    assert len(found) == 18
    assert sum(row.greedy for row in found) == 6
    sampled = [row.reward for row in found if not row.greedy]
    assert values["eval/avg@2"] == [pytest.approx(sum(sampled) / len(sampled))]
    greedy = [row.reward for row in found if row.greedy]
    assert values["eval/greedy"] == [pytest.approx(sum(greedy) / len(greedy))]
    hard = [row.reward for row in stack.client.samples(measured, env="hard", limit=100) if row.greedy]
    assert values["eval/greedy/hard"] == [pytest.approx(sum(hard) / 2)]
    assert {row.prompt for row in found if row.greedy} == {row.prompt for row in found if not row.greedy}
    with pytest.raises(Conflict, match="no ledger"):
        stack.client.audit(measured)

    with pytest.raises(ConfigError, match="no checkpoint 99999"):
        stack.client.submit(evaluation(f"job:{job}@99999", make_job()))


def check_sources(series: dict[str, list[float | None]], *, groups_per_batch: int) -> None:
    """Check that each update reports the rewards of both sources, and that they add up to the mean reward."""
    names = "addition", "hard"
    counts = [[value or 0 for value in series[f"groups/count/{name}"]] for name in names]
    sums = [[(v or 0) for v in series[f"reward/mean/{name}"]] for name in names]
    for index, mean in enumerate(series["reward/mean"]):
        if mean is None:  # a row of something else
            continue
        groups = [count[index] for count in counts]
        assert sum(groups) == groups_per_batch
        earned = sum(count * reward[index] for count, reward in zip(groups, sums, strict=True))
        assert earned / groups_per_batch == pytest.approx(mean), index
    assert sum(counts[0]) > sum(counts[1]) > 0


def test_an_evaluation_whose_model_does_not_load_says_so(stack: Any, make_job: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    job = stack.client.submit(evaluation(str(tmp_path), make_job())).id
    status = stack.finish(job).status
    assert status.phase == "failed"
    assert str(tmp_path) in status.message
