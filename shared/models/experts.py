"""Mixture-of-experts layers: a router selects experts, and each expert processes its tokens as one matrix.

Shape legend: T = tokens, D = model width, E = experts, K = experts of a token, A = T · K assignments, N = layers with
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Recorder", "RouterLoad", "Routes", "Routing", "Sparse", "run_experts"]


class Routing(Protocol):
    """Selects the experts of tokens in one forward pass, and records the selection."""

    def choose(self, layer: int, probs_TE: Tensor, top_k: int) -> Tensor:
        """Return the experts of each token, int64 [T, K].

        Args:
            layer: number among the layers with experts, from 0.
            probs_TE: the router's probabilities, float32.
        """


@dataclass(frozen=True, slots=True)
class Sparse:
    """Mixture-of-experts layer, which refers to the weights of the model's own modules.

    ``y = Σ_k w_k · expert_k(h)`` over the K most likely experts (arXiv 1701.06538, eq. 2), where w are their softmax
    probabilities over all experts, rescaled to sum 1 if ``normalise`` is set.
    """

    number: int
    """Index among the layers with experts, from 0."""
    router: Any
    """Router: module with ``weight`` [E, D]."""
    experts: Any
    """Stacked experts of width I: module with ``gate_up_proj`` [E, 2 I, D] and ``down_proj`` [E, D, I]."""
    top_k: int
    normalise: bool

    def __call__(self, h_TD: Tensor, routing: Routing | None) -> Tensor:
        probs_TE = torch.softmax(F.linear(h_TD, self.router.weight), -1, dtype=torch.float32)
        if routing is None:
            experts_TK = _likeliest(probs_TE, self.top_k)
        else:
            experts_TK = routing.choose(self.number, probs_TE, self.top_k)
        weights_TK = probs_TE.gather(-1, experts_TK)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return self._mix(h_TD, experts_TK, weights_TK.to(h_TD.dtype))

    def _mix(self, h_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Sort the assignments by expert, apply each expert to its rows, and restore the order.

        Rows are copied and permuted, never summed by index: every sum has a fixed order, also on a GPU.
        """
        experts_A = experts_TK.flatten()
        order_A = experts_A.argsort(stable=True)
        counts = torch.bincount(experts_A, minlength=self.router.weight.shape[0]).tolist()
        h_AD = h_TD.repeat_interleave(self.top_k, 0).index_select(0, order_A)
        out_AD = self.outputs(h_AD, counts)
        place_A = torch.empty_like(order_A)
        place_A[order_A] = torch.arange(len(order_A), device=order_A.device)
        out_TKD = out_AD.index_select(0, place_A).view(*experts_TK.shape, -1)
        return (out_TKD * weights_TK[..., None]).sum(1)

    def outputs(self, h_AD: Tensor, counts: list[int]) -> Tensor:
        """Return the experts' outputs, [A, D]: expert 0 is applied to the first ``counts[0]`` rows, and so on."""
        return run_experts(self.experts, h_AD, counts)


def run_experts(experts: Any, h_AD: Tensor, counts: list[int]) -> Tensor:
    """Apply each expert of ``experts`` to its rows of ``h_AD``, as ``Sparse.outputs`` does; return ``h_AD`` itself if
    it has no rows."""
    # unbind instead of indexing: the gradient of the stack is assembled once, not once per expert
    gate_up, down = experts.gate_up_proj.unbind(0), experts.down_proj.unbind(0)
    out = []
    for expert, rows in enumerate(torch.split(h_AD, counts)):
        if counts[expert]:
            gate, up = F.linear(rows, gate_up[expert]).chunk(2, -1)
            out.append(F.linear(F.silu(gate) * up, down[expert]))
    return torch.cat(out) if out else h_AD


class RouterLoad:
    """Router statistics, summed over tokens: selections and probabilities of each expert, and the router's entropy."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.chosen: dict[int, Tensor] = {}
        """For each layer: number of tokens per expert, int64 [E]."""
        self.probs: dict[int, Tensor] = {}
        """For each layer: sum of the router's probabilities, float32 [E], differentiable."""
        self.entropy: dict[int, Tensor] = {}
        """For each layer: sum of the entropies of the router's distributions, in nats."""

    def add(self, layer: int, experts_TK: Tensor, probs_TE: Tensor) -> None:
        """Add the selections of one layer."""
        if layer == 0:
            self.num_tokens += len(probs_TE)
        chosen_E = torch.bincount(experts_TK.flatten(), minlength=probs_TE.shape[1])
        entropy = torch.special.entr(probs_TE.detach()).sum(dtype=torch.float64)
        for sums, value in ((self.chosen, chosen_E), (self.probs, probs_TE.sum(0)), (self.entropy, entropy)):
            sums[layer] = sums[layer] + value if layer in sums else value


@dataclass(slots=True)
class Routes:
    """Routing in the trainer: uses the experts that the sampler selected, or, without a recorded selection, selects
    experts itself.

    Attributes:
        replay_TNK: experts to use, any integer type; None: the most likely. The weights of the experts are always
            computed by this model, so gradients reach the router (Rollout Routing Replay, arXiv 2510.11370, section 3).
        load: counts the selections; None: they are not counted.
    """

    replay_TNK: Tensor | None = None
    load: RouterLoad | None = None

    def choose(self, layer: int, probs_TE: Tensor, top_k: int) -> Tensor:
        """Return the experts to replay, or else the most likely experts, int64 [T, K]; see ``Routing.choose``."""
        replay = self.replay_TNK
        experts_TK = _likeliest(probs_TE, top_k) if replay is None else replay[:, layer].long()
        if self.load is not None:
            self.load.add(layer, experts_TK, probs_TE)
        return experts_TK

    def blocks(self, place_T: Tensor, sizes: list[int]) -> list[Routes]:
        """Return the routing of each block of tokens; every block counts its selections in ``load``.

        Args:
            place_T: index of each token in the concatenation of the blocks.
            sizes: number of tokens of each block.
        """
        if self.replay_TNK is None:
            return [self] * len(sizes)
        return [Routes(part, self.load) for part in torch.split(self.replay_TNK[torch.argsort(place_T)], sizes)]


class Recorder:
    """Routing in the sampler: selects the most likely experts, and records the selections for a replay."""

    def __init__(self) -> None:
        self._chosen: list[Tensor] = []

    def choose(self, layer: int, probs_TE: Tensor, top_k: int) -> Tensor:
        """Record and return the most likely experts, int64 [T, K]; see ``Routing.choose``."""
        self._chosen.append(_likeliest(probs_TE, top_k))
        return self._chosen[-1]

    def table(self) -> Tensor:
        """Return the selected experts, int64 [T, N, K]."""
        return torch.stack(self._chosen, 1)


def _likeliest(probs_TE: Tensor, top_k: int) -> Tensor:
    return torch.topk(probs_TE, top_k, dim=-1).indices
