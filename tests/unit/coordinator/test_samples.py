"""Completions as people see them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.services.coordinator.online.groups import example_group
from penstock.services.coordinator.samples import check_env, sample_rows
from penstock.shared.errors import NotFound
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import Group

EXACT = {"type": "exact"}


def group(*rewards: float, failed: tuple[int, ...] = ()) -> Group:
    answers = [[5, 6]] * len(rewards)
    made = example_group("j", Draw(0, 0), [4], answers, objective="policy", reward=0.0, epoch=1)
    broken = np.zeros(len(rewards), np.bool_)
    broken[list(failed)] = True
    return replace(made, rewards=np.array(rewards, np.float32), failed=broken)


def advantages(made: Group) -> list[float | None]:
    return [row["advantage"] for row in sample_rows(1, [made])]


def test_a_source_that_a_job_does_not_have_is_refused_with_those_it_has() -> None:
    base = {"name": "j", "model": {"config": {}, "tokenizer": "char"}}
    evaluation = {**base, "kind": "evaluation", "data": {"eval": {"type": "addition"}}, "reward": {"scorers": [EXACT]}}
    check_env(evaluation, "addition")
    with pytest.raises(NotFound, match=r"'hard'; they are called addition$"):
        check_env(evaluation, "hard")
    with pytest.raises(NotFound, match="it has none, for live agents send its prompts"):
        check_env({**base, "kind": "online_rl"}, "addition")


def test_what_has_nothing_to_be_compared_with_has_no_advantage() -> None:
    assert advantages(group(1.0)) == [None], "as every answer to a live agent"
    assert advantages(group(1.0, 0.5, failed=(1,))) == [None, None]
    assert advantages(group(1.0, 1.0)) == [0.0, 0.0], "there is something, and it is the same"
    assert advantages(group(1.0, 0.0, 0.5, failed=(2,))) == [
        pytest.approx(0.7071, abs=1e-4),
        pytest.approx(-0.7071, abs=1e-4),
        None,
    ]
