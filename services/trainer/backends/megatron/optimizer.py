"""AdamW over the parts that this rank holds, with gradients and their norm summed over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.services.trainer.backends.megatron.conversion import Parameter
from penstock.services.trainer.backends.megatron.groups import Groups
from penstock.services.trainer.optimizer import Optimizer
from penstock.shared.config.job import OptimizerConfig

__all__ = ["ShardedOptimizer"]

_EMBEDDING = "embedding.word_embeddings.weight"


class ShardedOptimizer(Optimizer):
    """The optimizer of the whole model, a part of it on each rank.

    Args:
        model: this rank's parameters, by their megatron-core names.
        mapping: what the parameters are parts of.
        sequence_parallel: norms see a part of the tokens, so that their gradients are parts too.
    """

    def __init__(
        self,
        model: nn.Module,
        mapping: Sequence[Parameter],
        groups: Groups,
        config: OptimizerConfig,
        *,
        sequence_parallel: bool,
    ) -> None:
        decayed = frozenset(p.name for p in mapping if len(p.pieces[0].shape) >= 2 and p.name != _EMBEDDING)
        super().__init__(model, config, decayed=decayed)
        self._groups = groups
        self._cut = frozenset(p.name for p in mapping if p.is_cut)
        # Norms of heads see this rank's heads only, routers weigh this rank's part of the experts' outputs.
        partial = ("q_layernorm.", "k_layernorm.", ".router.", *(("layernorm.",) if sequence_parallel else ()))
        self._partial = frozenset(p.name for p in mapping if any(part in p.name for part in partial))

    def step(self, learning_rate: float) -> float:
        """See ``Optimizer``."""
        for name, param in self._trained.items():
            assert param.grad is not None
            _add_up(param.grad, self._groups.gradients)
            if name in self._partial:
                _add_up(param.grad, self._groups.tensor)
        return super().step(learning_rate)

    def grad_norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Norm over the whole model: parts of all ranks, and what every rank holds once."""
        parts = torch.nn.utils.get_total_norm([grad for name, grad in grads.items() if name in self._cut]) ** 2
        whole = torch.nn.utils.get_total_norm([grad for name, grad in grads.items() if name not in self._cut]) ** 2
        _add_up(parts, self._groups.tensor)
        return (parts + whole).sqrt()


def _add_up(tensor: Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
