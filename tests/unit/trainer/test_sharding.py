"""The assignment of groups to ranks: balanced, complete, and the same on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.services.trainer.ranks.sharding import assign


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("minibatches", [1, 4])
def test_every_minibatch_is_balanced(ranks: int, minibatches: int) -> None:
    tokens = np.random.default_rng(ranks).integers(10, 900, 64)
    owner = assign(tokens.tolist(), minibatches=minibatches, ranks=ranks)
    assert set(owner.tolist()) == set(range(ranks))
    for groups in np.array_split(np.arange(64), minibatches):
        load = np.bincount(owner[groups], weights=tokens[groups], minlength=ranks)
        assert load.max() <= 4 / 3 * max(tokens[groups].sum() / ranks, tokens[groups].max())


def test_assignment_is_a_pure_function_and_one_rank_owns_everything() -> None:
    tokens = [5, 5, 5, 1]
    assert assign(tokens, minibatches=2, ranks=2).tolist() == assign(tokens, minibatches=2, ranks=2).tolist()
    assert assign(tokens, minibatches=2, ranks=1).tolist() == [0, 0, 0, 0]


def test_fewer_groups_than_ranks_leave_ranks_without_work() -> None:
    assert sorted(assign([7, 3], minibatches=1, ranks=3).tolist()) == [0, 1]
