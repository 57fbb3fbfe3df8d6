"""Mixture-of-experts layer of the megatron-core model. The expert-parallel ranks share out the experts; the
tensor-parallel ranks divide the width of each expert.

megatron-core's own layer is built for grouped kernels and exchanges between GPUs. The layer in this module computes the
same function as the layer of the sampler and of the other backends. Outputs of tensor-parallel ranks are partial sums,
and rows travel to the ranks of their experts and back.

Shape legend: T = tokens of this context-parallel rank, padding included, D = model width, E = experts, K = experts of a
token, A = T · K assignments, I = width of an expert on this rank, X = expert-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.services.trainer.backends.megatron.core import mappings
from penstock.services.trainer.backends.megatron.groups import Groups
from penstock.shared.models.experts import Routes, Routing, Sparse, run_experts

__all__ = ["ParallelExperts", "RealTokens"]


@dataclass(frozen=True, slots=True)
class RealTokens:
    """Routing of tokens that end with padding. ``routes`` applies to the first ``number`` tokens, which are real.

    The padding tokens after them go to the experts that the router prefers, and are not counted.
    """

    routes: Routes
    number: int

    def choose(self, layer: int, probs_TE: Tensor, top_k: int) -> Tensor:
        """Return the experts of each token, int64 [T, K]; see ``Routing``."""
        experts_TK = self.routes.choose(layer, probs_TE[: self.number], top_k)
        return torch.cat((experts_TK, Routes().choose(layer, probs_TE[self.number :], top_k)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dealt(Sparse):
    """Sparse layer of which each rank of ``group`` holds some experts. Forward and backward are collectives."""

    group: dist.ProcessGroup

    def outputs(self, h_AD: Tensor, counts: list[int]) -> Tensor:
        """Return the experts' outputs; see ``Sparse``. Rows travel to their experts and back (GShard, arXiv
        2006.16668)."""
        ranks = self.group.size()
        sent_E = torch.tensor(counts, device=h_AD.device)
        received_E = torch.empty_like(sent_E)
        dist.all_to_all_single(received_E, sent_E, group=self.group)
        to_XE = sent_E.view(ranks, -1).sum(1).tolist()
        from_XE: list[list[int]] = received_E.view(ranks, -1).tolist()
        from_X = [sum(row) for row in from_XE]
        by_rank = torch.split(mappings.all_to_all(self.group, h_AD, from_X, to_XE), [n for row in from_XE for n in row])
        own = len(from_XE[0])
        rows = torch.cat([by_rank[rank * own + expert] for expert in range(own) for rank in range(ranks)])
        out = run_experts(self.experts, rows, [sum(row[expert] for row in from_XE) for expert in range(own)])
        by_expert = torch.split(out, [row[expert] for expert in range(own) for row in from_XE])
        back = torch.cat([by_expert[expert * ranks + rank] for rank in range(ranks) for expert in range(own)])
        returned: Tensor = mappings.all_to_all(self.group, back, to_XE, from_X)
        return returned


class _Router(nn.Module):
    """Router weight [E, D], whole on every rank."""

    def __init__(self, like: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(like.weight.shape, dtype=dtype))


class _Experts(nn.Module):
    """Gate and up weights [E / X, 2 I, D] and down weights [E / X, D, I]."""

    def __init__(self, like: Any, groups: Groups, dtype: torch.dtype) -> None:
        super().__init__()
        experts, twice_width, model_width = like.gate_up_proj.shape
        experts, ranks = experts // groups.experts.size(), groups.tensor.size()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, twice_width // ranks, model_width, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, model_width, twice_width // 2 // ranks, dtype=dtype))


class ParallelExperts(nn.Module):
    """MoE module for the slot ``mlp`` of megatron-core's layer specification; computes the same function as ``like``.

    Set ``routing`` before each forward pass, and again before activations are recomputed.
    """

    routing: Routing | None = None

    def __init__(self, *, config: Any, like: Sparse, groups: Groups) -> None:
        super().__init__()
        self._group = groups.tensor
        self._sequence_parallel = config.sequence_parallel
        self.router = _Router(like.router, config.params_dtype)
        self.experts = _Experts(like.experts, groups, config.params_dtype)
        own = Sparse if groups.experts.size() == 1 else partial(_Dealt, group=groups.experts)
        self._sparse = own(like.number, self.router, self.experts, like.top_k, like.normalise)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Map hidden states [T, 1, D] to outputs [T, 1, D] and None, as there is no bias.

        With sequence parallelism, each tensor-parallel rank passes and gets its equal share of the T tokens.
        """
        if self._sequence_parallel:
            h = mappings.gather_from_sequence_parallel_region(hidden_states, group=self._group)
        else:
            h = mappings.copy_to_tensor_model_parallel_region(hidden_states, group=self._group)
        out = self._sparse(h[:, 0], self.routing)[:, None].contiguous()  # reduced in place
        if self._sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self._group), None
        return mappings.reduce_from_tensor_model_parallel_region(out, group=self._group), None
