"""AdamW over the parameters of this rank, with gradients and their norm reduced over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.services.trainer.backends.megatron.conversion import EMBEDDING, Parameter
from penstock.services.trainer.backends.megatron.groups import Groups
from penstock.services.trainer.optimizer import Optimizer
from penstock.shared.config.jobs.job import OptimizerConfig

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(Optimizer):
    """Optimizer of the whole model; each rank steps its own part.

    Args:
        parameters: this rank's parameters by megatron-core name.
        mapping: division of the whole model into parameters.
        sequence_parallel: whether normalization layers see only part of the tokens, so that their gradients are partial
            sums.
        tied: whether the embedding is also the head; with several stages the first and the last hold it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mapping: Sequence[Parameter],
        groups: Groups,
        config: OptimizerConfig,
        *,
        sequence_parallel: bool,
        tied: bool,
    ) -> None:
        decayed = frozenset(p.name for p in mapping if len(p.pieces[0].shape) >= 2 and p.name != EMBEDDING)
        super().__init__(parameters, config, decayed=decayed)
        self._groups, self._tied = groups, tied
        self._cut = frozenset(p.name for p in mapping if p.is_cut and not p.is_dealt)
        self._dealt = frozenset(p.name for p in mapping if p.is_dealt)
        # Head norms see only this rank's heads, and routers weigh only this rank's part of the experts' outputs.
        partial = ("q_layernorm.", "k_layernorm.", ".router.", *(("layernorm.",) if sequence_parallel else ()))
        self._partial = frozenset(p.name for p in mapping if any(part in p.name for part in partial))
        stage, _ = groups.in_pipeline()
        self._copies = frozenset(p.name for p in mapping if p.stage != stage)

    def step(self, learning_rate: float) -> float:
        """Clip the gradients, make a step and zero the gradients; see ``Optimizer``."""
        self.complete(list(self._trained.values()))  # ranks sum gradients that some of them may lack
        for name, param in self._trained.items():
            assert param.grad is not None
            _add_up(param.grad, self._groups.same_experts if name in self._dealt else self._groups.gradients)
            if name in self._partial:
                _add_up(param.grad, self._groups.tensor)
            if name == EMBEDDING and self._tied:
                _add_up(param.grad, self._groups.ends)
        return super().step(learning_rate)

    def grad_norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the gradient norm of the whole model. Parameters that several ranks hold count once."""
        own = {name: grad for name, grad in grads.items() if name not in self._copies}
        experts = _square([grad for name, grad in own.items() if name in self._dealt])
        _add_up(experts, self._groups.experts)
        parts = _square([grad for name, grad in own.items() if name in self._cut]) + experts
        _add_up(parts, self._groups.tensor)
        stage = parts + _square([grad for name, grad in own.items() if name not in self._cut | self._dealt])
        _add_up(stage, self._groups.pipeline)
        return stage.sqrt()


def _square(grads: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(grads) ** 2


def _add_up(tensor: Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
