"""Which experts each token went to when it was first computed: what the trainer replays.

A token is computed again when the weights change under a running completion. The token after it was drawn from the
first computation, so that one is kept.

Shape legend: R = rows, C = token capacity of a row, N = layers with experts, K = experts of a token, W = tokens to
write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.models.architecture import Plan

__all__ = ["RouteTable"]


class RouteTable:
    """Experts of every position of every row. Rows come and go as in ``Rows``."""

    def __init__(self, plan: Plan, rows: int, device: torch.device) -> None:
        num_experts = plan.sparse[0].router.weight.shape[0]
        dtype = torch.uint8 if num_experts <= 1 << 8 else torch.int16
        shape = (rows, 0, len(plan.sparse), plan.sparse[0].top_k)
        self._table_RCNK = torch.zeros(shape, dtype=dtype, device=device)
        self._known_R = torch.zeros(rows, dtype=torch.long, device=device)

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in each row."""
        extra = length - self._table_RCNK.shape[1]
        if extra > 0:
            self._table_RCNK = torch.nn.functional.pad(self._table_RCNK, (0, 0, 0, 0, 0, extra + length // 2))

    def add(self, start: int, stop: int) -> None:
        """Nothing is known of rows [start, stop) yet."""
        self._known_R[start:stop] = 0

    def write(self, row_W: Tensor, position_W: Tensor, chosen_WNK: Tensor) -> None:
        """Keep the experts of tokens that are computed for the first time."""
        new_W = position_W >= self._known_R[row_W]
        self._table_RCNK[row_W[new_W], position_W[new_W]] = chosen_WNK[new_W].to(self._table_RCNK.dtype)
        self._known_R.scatter_reduce_(0, row_W, position_W + 1, "amax")

    def take(self, row: int, length: int) -> NDArray[Any]:
        """A copy of the experts of the first ``length`` tokens of a row, uint8 or uint16 [length, N, K]."""
        table: NDArray[Any] = self._table_RCNK[row, :length].to("cpu", copy=True).numpy()
        return table if table.dtype == np.uint8 else table.view(np.uint16)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows."""
        for tensor in (self._table_RCNK, self._known_R):
            tensor[targets] = tensor[sources]
