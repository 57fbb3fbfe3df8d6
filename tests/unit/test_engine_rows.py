"""Rows of the embedded engine: their order after some are dropped, and the cost of logit biases."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.embedded.rows import Rows
from penstock.shared.protocol.generation import Sampling

VOCAB = 2048


class Ops(TorchDispatchMode):
    """Count the operations of torch inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def biased(number: int) -> tuple[torch.Tensor, int]:
    sampling = Sampling(max_new_tokens=4, logit_bias=tuple((token, 0.5 * token) for token in range(number)))
    rows = Rows(2, torch.device("cpu"))
    rows.reserve(8)
    rows.add([Completion(0, index, (1, 2), sampling, (3,), index) for index in range(2)], 0, "")
    rows.drop([0], 2)
    with Ops() as ops:
        nudge = rows.draws(0, 1, VOCAB).nudge_RV
    assert nudge is not None
    return nudge, ops.count


@given(data=st.data())
def test_rows_that_are_computed_stay_in_front_and_the_others_in_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    fresh = data.draw(st.integers(0, count))
    gone = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    rows = Rows(12, torch.device("cpu"))
    rows.reserve(4)
    rows.add([Completion(number, 0, (number,), Sampling(max_new_tokens=2), (), 0) for number in range(count)], 0, "")
    moves = rows.drop(gone, fresh)
    left = [completion.request for completion in rows.completions]
    assert left == rows.tokens_RC[: rows.count, 0].tolist()
    num_fresh = fresh - sum(row < fresh for row in gone)
    assert sorted(left[:num_fresh]) == [row for row in range(fresh) if row not in gone]
    assert left[num_fresh:] == [row for row in range(fresh, count) if row not in gone]
    stayed = {row for row in range(count) if row not in gone} - {source for source, _ in moves}
    assert all(left[target] == source for source, target in moves)
    assert all(left[row] == row for row in stayed), "no other row moved"


def test_many_biases_cost_as_many_operations_as_one() -> None:
    (_, few), (nudge_RV, many) = biased(1), biased(1024)
    assert few == many
    expected = torch.zeros(1, VOCAB)
    expected[0, :1024] = torch.arange(1024) * 0.5
    assert torch.equal(nudge_RV, expected)
