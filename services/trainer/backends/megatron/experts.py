"""A mixture-of-experts layer inside the megatron-core model: each tensor-parallel rank holds a slice of every expert.

megatron-core's own layer is built for grouped kernels and exchanges between GPUs. This one is the layer of trainer and
sampler over the rank's slice of the experts' width; the ranks' outputs are partial sums.

Shape legend: T = tokens of this context-parallel rank, padding included, D = model width, E = experts, K = experts of a
token, I = width of an expert on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.backends.megatron.core import mappings, parallel_state
from penstock.shared.models.experts import Routes, Routing, Sparse

__all__ = ["ParallelExperts", "RealTokens"]


@dataclass(frozen=True, slots=True)
class RealTokens:
    """``routes`` for the first ``number`` tokens; padding after them goes where its router says, uncounted."""

    routes: Routes
    number: int

    def choose(self, layer: int, probs_TE: Tensor, top_k: int) -> Tensor:
        """See ``Routing``."""
        experts_TK = self.routes.choose(layer, probs_TE[: self.number], top_k)
        return torch.cat((experts_TK, Routes().choose(layer, probs_TE[self.number :], top_k)))


class _Router(nn.Module):
    """Weight [E, D], whole on every rank."""

    def __init__(self, like: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(like.weight.shape, dtype=dtype))


class _Experts(nn.Module):
    """Gate and up [E, 2 I, D], down [E, D, I]."""

    def __init__(self, like: Any, ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        experts, twice_width, model_width = like.gate_up_proj.shape
        self.gate_up_proj = nn.Parameter(torch.empty(experts, twice_width // ranks, model_width, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, model_width, twice_width // 2 // ranks, dtype=dtype))


class ParallelExperts(nn.Module):
    """``mlp`` of the layer specification; computes what ``like`` does.

    ``routing`` is set before a forward pass and stays until its backward pass is over.
    """

    routing: Routing | None = None

    def __init__(self, *, config: Any, like: Sparse) -> None:
        super().__init__()
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._sequence_parallel = config.sequence_parallel
        self.router = _Router(like.router, config.params_dtype)
        self.experts = _Experts(like.experts, self._group.size(), config.params_dtype)
        self._sparse = replace(like, router=self.router, experts=self.experts)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[T, 1, D] -> ([T, 1, D], no bias); T / ranks with sequence parallelism."""
        if self._sequence_parallel:
            h = mappings.gather_from_sequence_parallel_region(hidden_states, group=self._group)
        else:
            h = mappings.copy_to_tensor_model_parallel_region(hidden_states, group=self._group)
        out = self._sparse(h[:, 0], self.routing)[:, None].contiguous()  # it is summed in place
        if self._sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self._group), None
        return mappings.reduce_from_tensor_model_parallel_region(out, group=self._group), None
