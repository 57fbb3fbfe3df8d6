"""Router table: the experts that each token was routed to when it was first computed, for router replay in the trainer.

When the weights change during a completion, its tokens are recomputed. The following token was sampled from the first
computation, so the experts of the first computation are kept.

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
    """Experts of every position of every row, [R, C, N, K]. Rows are added and moved as in ``Rows``."""

    def __init__(self, plan: Plan, rows: int, device: torch.device) -> None:
        num_experts = plan.sparse[0].router.weight.shape[0]
        dtype = torch.uint8 if num_experts <= 1 << 8 else torch.int16
        shape = (rows, 0, len(plan.sparse), plan.sparse[0].top_k)
        self._table_RCNK = torch.zeros(shape, dtype=dtype, device=device)
        self._known_R = torch.zeros(rows, dtype=torch.long, device=device)

    def reserve(self, length: int) -> None:
        """Grow the capacity to at least ``length`` tokens per row."""
        extra = length - self._table_RCNK.shape[1]
        if extra > 0:
            self._table_RCNK = torch.nn.functional.pad(self._table_RCNK, (0, 0, 0, 0, 0, extra + length // 2))

    def add(self, start: int, stop: int) -> None:
        """Clear rows [start, stop) for new completions."""
        self._known_R[start:stop] = 0

    def write(self, row_W: Tensor, position_W: Tensor, chosen_WNK: Tensor) -> None:
        """Store the experts [W, N, K] of tokens that are computed for the first time; ignore recomputed ones."""
        new_W = position_W >= self._known_R[row_W]
        self._table_RCNK[row_W[new_W], position_W[new_W]] = chosen_WNK[new_W].to(self._table_RCNK.dtype)
        self._known_R.scatter_reduce_(0, row_W, position_W + 1, "amax")

    def take(self, row: int, length: int) -> NDArray[Any]:
        """Return a copy of the expert ids of the first ``length`` tokens of a row, uint8 or uint16 [length, N, K]."""
        table: NDArray[Any] = self._table_RCNK[row, :length].to("cpu", copy=True).numpy()
        return table if table.dtype == np.uint8 else table.view(np.uint16)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows ``sources`` to ``targets``."""
        for tensor in (self._table_RCNK, self._known_R):
            tensor[targets] = tensor[sources]
