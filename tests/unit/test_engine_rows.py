"""The cost of a step does not depend on how much a client asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.rows import Rows
from penstock.shared.protocol.generation import Sampling

VOCAB = 2048


class Ops(TorchDispatchMode):
    """Counts operations."""

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
    rows.drop([0])
    with Ops() as ops:
        nudge = rows.draws(0, 1, VOCAB).nudge_RV
    assert nudge is not None
    return nudge, ops.count


def test_many_biases_cost_as_many_operations_as_one() -> None:
    (_, few), (nudge_RV, many) = biased(1), biased(1024)
    assert few == many
    expected = torch.zeros(1, VOCAB)
    expected[0, :1024] = torch.arange(1024) * 0.5
    assert torch.equal(nudge_RV, expected)
