"""Warnings about a run that learns nothing or goes wrong; a healthy run gets none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import pytest

from penstock.services.coordinator.leader.measures import Measures
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.training.health import Health, health_warnings, rate_warnings
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.kinds import parse_job, parse_training
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import GroupHeader

JOB: dict[str, Any] = {
    "name": "health",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 500},
}
EMBODIED: dict[str, Any] = {
    "kind": "embodied", "name": "health", "environment": {"backend": "metaworld", "task": "reach-v3", "horizon": 100},
    "train": {"batch_size": 16, "max_updates": 500},
}  # fmt: skip
WELL = {"reward/min": 0.0, "reward/max": 1.0, "groups/count": 2.0, "groups/no_signal": 0.0, "policy/entropy": 1.0,
        "policy/approx_kl": 0.01, "optimizer/grad_norm": 0.5, "optimizer/steps": 1.0, "length/truncated": 0.0,
        "sequences/arrived": 16.0, "sequences/unscored": 0.0}  # fmt: skip


def run(
    rows: Iterable[Mapping[str, float]], health: Health | None = None
) -> tuple[Health, list[tuple[int, str, bool]]]:
    """Feed ``rows`` to ``health``; return it, and its changes as (update, kind, True if raised, False if cleared)."""
    health = health or Health(parse_training(JOB))
    changes = []
    for number, row in enumerate(rows, 1):
        health.take(number, {**WELL, **row})
        changes += [(number, change.kind, bool(change.message)) for change in health.judge()]
    return health, changes


def rising(count: int) -> list[dict[str, float]]:
    """Return rows of a reward that rises from 0.1 to 0.9, with some noise."""
    return [{"reward/mean": 0.1 + 0.8 * i / count + 0.02 * (-1) ** i} for i in range(count)]


def test_a_run_that_learns_has_no_warning_even_once_solved() -> None:
    solved = [{"reward/mean": 0.98, "groups/no_signal": 2.0, "policy/entropy": 0.001}] * 50
    health, changes = run([*rising(100), *solved])
    assert (changes, health.judge(ended=True)) == ([], [])


def test_groups_without_variance_raise_a_warning() -> None:
    dead = {"reward/mean": 0.0, "reward/max": 0.0, "groups/no_signal": 2.0}
    health, changes = run([dead] * 12)
    assert changes == [(5, "no_signal", True)], "warned once"
    assert "every completion so far earned 0" in health.warnings["no_signal"]
    waking = {"reward/mean": 0.1, "groups/no_signal": 1.0}
    health, changes = run([waking] * 9, health)
    assert changes == [(9, "no_signal", False)], "the warning ends well below the bound at which it began"
    short, changes = run([dead] * 3)
    assert changes == []
    assert [change.kind for change in short.judge(ended=True)] == ["no_signal"], "a short run is judged at its end"


@pytest.mark.parametrize(("success", "kinds"), [(1.0, []), (0.0, ["no_signal"])])
def test_episodes_that_all_succeed_need_no_signal(success: float, kinds: list[str]) -> None:
    """Dense returns vary far below the best one, though each episode that arrives solves the task.

    The episodes that are trained solve it less often, because groups that all succeed are replaced.
    """
    sampled = {"type": "grpo", "dynamic_sampling": {}}
    health = Health(parse_training({**EMBODIED, "algorithm": sampled}))
    for number in range(1, 11):
        values = {"reward/mean": 0.4, "dropped/no_signal": 12.0, "success/rate": 0.5, "sequences/arrived": 112.0,
                  "sequences/succeeded": 112 * success}  # fmt: skip
        health.take(number, {**WELL, **values})
    assert [change.kind for change in health.judge()] == kinds
    assert success or "or all succeed, or all fail" in health.warnings["no_signal"]


def test_endless_resampling_raises_a_warning_before_the_first_update() -> None:
    health = Health(parse_training(JOB))
    health.recent = {"dropped/no_signal": 10.0}
    assert [change.kind for change in health.judge()] == ["no_signal"]


def test_a_reward_that_does_not_rise() -> None:
    flat = [{"reward/mean": 0.4 + 0.05 * (i % 3)} for i in range(300)]
    health, changes = run(flat)
    assert changes == [(60, "reward_stuck", True)]
    _, changes = run([{"reward/mean": 0.7 + 0.05 * (i % 3)} for i in range(100)], health)
    assert changes[-1][1:] == ("reward_stuck", False)
    fallen, _ = run([{"reward/mean": 0.5 - 0.005 * i} for i in range(70)])
    assert "0.445 in the first 23 updates, 0.21 in the last 23 of 70" in fallen.warnings["reward_stuck"]


def test_an_entropy_that_collapses_while_the_reward_is_low() -> None:
    rows = [{"reward/mean": 0.2, "policy/entropy": 1.0 if i < 15 else 0.01} for i in range(40)]
    health, changes = run(rows)
    assert [change[1:] for change in changes] == [("entropy_collapse", True)]
    assert "from 1 to 0.01 nats" in health.warnings["entropy_collapse"]


def test_spikes_raise_warnings_for_some_updates() -> None:
    rows = rising(40)
    rows[20] |= {"policy/approx_kl": 0.5}
    rows[30] |= {"optimizer/grad_norm": 40.0}
    assert run(rows)[1] == [
        (21, "kl_spike", True), (26, "kl_spike", False), (31, "gradient_spike", True), (36, "gradient_spike", False),
    ]  # fmt: skip
    small = rising(40)
    small[20] |= {"policy/approx_kl": 0.09, "optimizer/grad_norm": 4.9}
    assert run(small)[1] == [], "within ten times the median, or harmless"


def test_gradients_that_are_not_finite() -> None:
    values = {name: value for name, value in WELL.items() if name != "optimizer/grad_norm"}
    health = Health(parse_training(JOB))
    health.take(1, {**values, "optimizer/steps": 0.0})
    assert [change.kind for change in health.judge()] == ["gradient_spike"]


def test_completions_cut_off() -> None:
    cut = [{**row, "length/truncated": 0.5} for row in rising(10)]
    half = [{**row, "length/truncated": 0.25} for row in rising(10)]
    assert run([*cut, *half, *rising(10)])[1] == [(5, "truncation", True), (23, "truncation", False)]
    spec = {**JOB, "sampling": {"max_new_tokens": 4, "ignore_eos": True}}
    assert run(cut, Health(parse_training(spec)))[1] == []


def test_a_scorer_that_sometimes_fails_raises_a_warning_with_its_error() -> None:
    measures = Measures(parse_training(JOB), cast(Outbox, None))
    measures.begin(LedgerState(), held_out=[], now=0.0)
    measures.health.recent = measures.tally.since
    error = "completion 1: scorer 'mine' raised KeyError: 'x' (/w/reward.py, line 7)"
    found = []
    for ordinal in range(30):
        failed = ordinal == 3
        measures.on_group(header(ordinal, failed=failed, error=error if failed else ""), duplicate=False)
        found += [(ordinal + 1, change.message) for change in measures.health.judge()]
    text = f"1 of the newest 32 completions could not be scored and are not trained on; the newest error: {error}"
    assert found == [(4, text), (26, "")], "from one in 100 on, until it is less than one in 200"


def test_episodes_of_a_group_that_holds_none_are_lost() -> None:
    """A group whose simulator began no episode has an error and no rows; the episodes that it should have are lost."""
    embodied = {
        "kind": "embodied", "name": "arm", "environment": {"task": "CartPole-v1", "horizon": 9},
        "algorithm": {"type": "grpo", "group_size": 4}, "train": {"batch_size": 8, "max_updates": 9},
    }  # fmt: skip
    measures = Measures(parse_training(embodied), cast(Outbox, None))
    measures.begin(LedgerState(), held_out=[], now=0.0)
    measures.health.recent = measures.tally.since
    empty = {"lengths": [], "rewards": [], "failed": [], "truncated": []}
    for ordinal in range(3):
        whole = header(ordinal, failed=False, error="")
        lost = msgspec.structs.replace(whole, error="RuntimeError: the arm is gone", **empty)
        measures.on_group(lost if ordinal else whole, duplicate=False)
    text = (
        "8 of the newest 16 episodes were lost and are not trained on; the newest error: RuntimeError: the arm is gone"
    )
    assert [change.message for change in measures.health.judge()] == [text]


def header(ordinal: int, *, failed: bool, error: str) -> GroupHeader:
    return GroupHeader(
        draw=Draw(ordinal), attempt="a", epoch=1, digest="d", nbytes=1, prompt_tokens=2, lengths=[1] * 8,
        rewards=[0.0] * 8, failed=[failed] + [False] * 7, truncated=[False] * 8, finite=True, min_version=0,
        max_version=0, worker="w", error=error,
    )  # fmt: skip


def test_a_fork_clears_warnings_about_rolled_back_updates() -> None:
    dead = {"reward/mean": 0.0, "reward/max": 0.0, "groups/no_signal": 2.0}
    health, _ = run([*rising(20), *[dead] * 20])
    assert set(health.warnings) >= {"no_signal"}
    health.roll_back(LedgerState(last_trained=40, updates=20, rolled_back=((21, 40),)))
    assert [(change.kind, change.message) for change in health.judge()] == [("no_signal", "")]


def test_a_warning_keeps_its_time_while_it_holds() -> None:
    health, _ = run([{"reward/mean": 0.0, "reward/max": 0.0, "groups/no_signal": 2.0}] * 5)
    first = health_warnings(health, [], datetime(2026, 1, 1, tzinfo=UTC))
    assert health_warnings(health, first, datetime(2026, 1, 2, tzinfo=UTC)) == first
    assert [one.kind for one in first] == ["no_signal"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optimizer": {"learning_rate": 1.0}}, "optimizer.learning_rate: 1"),
        ({"optimizer": {"learning_rate": 1e-10}}, "optimizer.learning_rate: 1e-10"),
        ({"optimizer": {"learning_rate": 2e-3}, "model": {"path": "org/model"}}, "optimizer.learning_rate: 0.002"),
        ({"warm_start": {"steps": 2, "learning_rate": 0.5}}, "warm_start.learning_rate: 0.5"),
        ({"algorithm": {"type": "ppo", "critic": {"optimizer": {"learning_rate": 3.0}}}},
         "algorithm.critic.optimizer.learning_rate: 3"),
        ({"optimizer": {"learning_rate": 2e-3}}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_learning_rates_that_are_slips(changes: dict[str, Any], key: str) -> None:
    found = rate_warnings(parse_job({**JOB, **changes}))
    assert [text.startswith(key) for text in found] == ([True] if key else [])
