"""Baselines from siblings: answers to one task in one batch are compared with each other."""

from __future__ import annotations

import importlib.util
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online.admission import facts_of
from penstock.services.coordinator.online.source import (
    admission_of,
    baselines_of,
    flaws_of_baselines,
    origin_of,
    siblings_of,
)
from penstock.services.coordinator.online.turns import Trajectory, Turn
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.algorithms.baseline import mean_without
from penstock.shared.protocol.events import Admission, Admitted, Drawn
from penstock.shared.protocol.ids import Draw


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{name}_of_siblings", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tracked, learning = load("test_tracked_values"), load("test_online_learning")


def ledger_with(*members: tuple[Any, ...], **baseline: Any) -> tuple[Any, list[Draw]]:
    """Build a ledger that has admitted ``members``, each (group, reward, *origin); return it and their draws."""
    found = tracked.Ledger(tracked.job(siblings=True, **baseline))
    found.add(Drawn(writer_epoch=1, time=0, start=0, stop=len(members), min_version=0, deadline=0))
    admissions = [
        Admission(n, {f"i{n}": n + 1}, {}, reward, 0, "k", "u", "feedback", 0, group=group, origin=list(origin))
        for n, (group, reward, *origin) in enumerate(members)
    ]
    found.add(Admitted(writer_epoch=1, time=0, admissions=admissions, low_interactions=9, low_feedback=1))
    return found, [Draw(n) for n in range(len(members))]


@pytest.mark.parametrize(("rewards", "means"), [([1.0, 0.0], [0.0, 1.0]), ([1.0, 2.0, 6.0], [4.0, 3.5, 1.5])])
def test_the_baseline_is_the_mean_of_the_siblings(rewards: list[float], means: list[float]) -> None:
    assert [mean_without(rewards, [reward]) for reward in rewards] == means
    assert mean_without(rewards, rewards) is None


def test_the_baseline_does_not_depend_on_the_order() -> None:
    rewards = [0.1, 0.7, -0.3, 1e-9]
    expected = {reward: mean_without(rewards, [reward]) for reward in rewards}
    for order in permutations(rewards):
        assert {reward: mean_without(order, [reward]) for reward in order} == expected


def test_siblings_are_compared_and_single_answers_use_the_tracked_value() -> None:
    found, draws = ledger_with(("a", 1.0), ("b", 0.5), ("a", 0.0), ("", 0.25), ("", -0.25), ("a", 0.5), value=0.125)
    baselines, tracking = baselines_of(found.config, found.state, draws)
    assert [baselines[draw] for draw in draws] == [0.25, 0.125, 0.75, 0.125, 0.125, 0.5]
    assert tracking.rewards[""][1] == 6, "all rewards are tracked, as without siblings"
    part, _ = baselines_of(found.config, found.state, draws[:2])
    assert [part[draw] for draw in draws[:2]] == [0.125, 0.125], "the others are not in this batch"


def test_turns_of_one_episode_are_compared_with_other_episodes_only() -> None:
    split = [("g", 1.0, "e1", "r1"), ("g", 0.5, "e1", "r2")]
    found, draws = ledger_with(*split, ("g", 0.0, "e2", "r3"), value=0.125)
    baselines, _ = baselines_of(found.config, found.state, draws)
    assert [baselines[draw] for draw in draws] == [0.0, 0.0, 0.75]
    alone, _ = baselines_of(found.config, found.state, draws[:2])
    assert [alone[draw] for draw in draws[:2]] == [0.125, 0.125], "its own turns are no baseline"
    choices, draws = ledger_with(*split, ("g", -1.0, "e1", "r2"), ("g", 0.25), value=0.125)
    baselines, _ = baselines_of(choices.config, choices.state, draws)
    assert [baselines[draw] for draw in draws] == [0.25, -0.375, 0.375, 0.5 / 3], "choices of one request are samples"


def test_an_admission_names_its_episode() -> None:
    turn = Turn(1, learning.interaction("i1", tags={"group_id": "g"}, request="r1", episode="talk", key_id="k1"))
    trajectory = Trajectory((turn,), 0.5, "feedback", {})
    draft: Any = SimpleNamespace(state=LedgerState(), now=0.0)
    admission = admission_of(tracked.job(siblings=True), draft, 0, trajectory, 5)
    assert (admission.group, admission.origin) == ("k1 g", ["k1 talk", "r1"])
    assert origin_of(turn.interaction) == admission.origin
    assert admission_of(tracked.job(), draft, 0, trajectory, 5).origin == []


def test_an_audit_checks_the_baselines_of_siblings() -> None:
    found, draws = ledger_with(("a", 1.0), ("a", 0.0))
    before = found.state
    found.seal(draws)
    sealed = found.events[-1]
    fresh, _ = ledger_with(("a", 1.0), ("a", 0.0))
    assert before is found.state
    assert flaws_of_baselines(found.config, fresh.state, sealed) == []
    wrong = replace(sealed, groups=[replace(sealed.groups[0], baseline=0.5), *sealed.groups[1:]])
    assert flaws_of_baselines(found.config, fresh.state, wrong)


def test_siblings_share_a_request_or_a_tag() -> None:
    config, without = tracked.job(siblings=True), tracked.job()
    choices = [learning.interaction(name, request="r1", index=place) for place, name in enumerate(("c0", "c1"))]
    assert {siblings_of(config, one) for one in choices} == {"r1"}
    named = learning.interaction("i1", tags={"group_id": "g"}, key_id="k1")
    assert siblings_of(config, named) == "k1 g", "other keys may use the same name"
    assert siblings_of(without, named) == ""
    posted = learning.rating(kind="interaction", key_id="k1", body={"group_id": "g", "token_ids": [1]})
    assert facts_of(posted).group == "k1 g"
    assert facts_of(learning.rating(kind="interaction", body={})).group == ""
