"""Optimizer over this rank's rows: steps are element-wise, so only the gradient norm needs the other ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.services.trainer.optimizer import Optimizer
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.ranks.row_shards import local_part
from penstock.shared.config.jobs.job import OptimizerConfig

__all__ = ["ShardOptimizer"]


class ShardOptimizer(Optimizer):
    """``Optimizer`` over parameters that share their memory with the DTensors of a sharded model.

    Args:
        params: DTensors by name; this class allocates their gradients, and FSDP adds to them in place.
        collective: all ranks that hold rows.
        decayed: names of the parameters with weight decay.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        collective: Collective,
        *,
        decayed: frozenset[str],
    ) -> None:
        self._collective = collective
        trained = {name: param for name, param in params.items() if param.requires_grad}
        rows = {name: nn.Parameter(local_part(param.detach())) for name, param in trained.items()}
        super().__init__(rows, config, decayed=decayed)
        for name, param in trained.items():
            param.grad = torch.zeros_like(param.detach())
            rows[name].grad = local_part(param.grad)

    def grad_norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the L2 norm over the rows of all ranks, summed in float64 in rank order."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads.values()]
        squares = float(torch.stack(norms).square().sum())
        total = self._collective.sum({"squares": squares})["squares"]
        return torch.tensor(math.sqrt(total), dtype=torch.float32, device=norms[0].device)

    def clear(self, trained: list[Tensor]) -> None:
        """Zero the gradients in place, because FSDP adds into the same memory."""
        for param in trained:
            assert param.grad is not None
            param.grad.zero_()
