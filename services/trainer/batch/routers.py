"""Routers of a mixture of experts during training: load-balancing loss and metrics.

Shape legend: N = layers with experts, E = experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.ranks.collective import Collective
from penstock.shared.algorithms.load_balancing import load_balancing_loss
from penstock.shared.errors import ProtocolError
from penstock.shared.models.architecture import Plan
from penstock.shared.models.experts import RouterLoad

__all__ = ["Routers", "check_table"]

Floats = NDArray[np.float64]


def check_table(experts: NDArray[Any] | None, routers: Routers | None, *, wanted: bool) -> None:
    """Raise ProtocolError unless a batch's router table, [T, N, K], can be replayed by this model.

    ``wanted``: whether a table is required.
    """
    if experts is None and wanted:
        raise ProtocolError("no router table: the sampler did not record what model.moe.router_replay needs")
    if experts is None or not experts.size:
        return
    if routers is None or experts.shape[1:] != routers.table_shape or int(experts.max()) >= routers.num_experts:
        raise ProtocolError(f"a router table of {list(experts.shape)}, up to expert {experts.max()}: of another model")


class Routers:
    """Load statistics of one trained mixture of experts.

    A backend counts the expert choices of a minibatch with ``count``, ``aim`` sums them over ranks, and ``penalty``
    then returns each microbatch's share of the load-balancing loss. ``watch`` collects the metrics of ``report``.
    """

    def __init__(self, plan: Plan, *, coef: float) -> None:
        self.coef = coef
        self.num_layers, self.num_experts = len(plan.sparse), int(plan.sparse[0].router.weight.shape[0])
        self._top_k = plan.sparse[0].top_k
        self._counted_NE = self._zeros()
        self._aim_NE: Floats | None = None
        self.clear()

    @property
    def share(self) -> float:
        """Fraction of the experts that a token visits."""
        return self._top_k / self.num_experts

    @property
    def table_shape(self) -> tuple[int, int]:
        """Last two dimensions of a router table [T, N, K]: layers with experts, and experts that a token visits."""
        return self.num_layers, self._top_k

    def count(self, chosen: Mapping[int, Tensor]) -> None:
        """Add how often each expert was chosen in a part of the next minibatch, int64 [E] by layer."""
        for layer, chosen_E in chosen.items():
            self._counted_NE[layer] += chosen_E.cpu().numpy()

    def count_table(self, experts_TNK: Tensor) -> None:
        """Count the expert choices in a router table that the next minibatch will replay."""
        flat_NA = experts_TNK.long().transpose(0, 1).flatten(1)
        self.count({n: torch.bincount(row_A, minlength=self.num_experts) for n, row_A in enumerate(flat_NA)})

    def aim(self, collective: Collective) -> None:
        """Sum the counted choices over all ranks. Store the sums as the expert loads that ``penalty`` uses, and reset
        the counts."""
        self._aim_NE, self._counted_NE = _summed(self._counted_NE, collective), self._zeros()

    def penalty(self, load: RouterLoad) -> Tensor:
        """Return this microbatch's share of ``coef`` times the load-balancing loss of every layer; 0 before ``aim``."""
        (first, *_) = load.probs.values()
        total = torch.zeros((), device=first.device, dtype=torch.float32)
        if self._aim_NE is None or not self.coef:
            return total
        num_tokens = int(self._aim_NE[0].sum()) // self._top_k
        for layer, probs_E in load.probs.items():
            chosen_E = torch.from_numpy(self._aim_NE[layer]).to(probs_E.device)
            total = total + load_balancing_loss(probs_E, chosen_E, num_tokens=num_tokens)
        return self.coef * total

    def watch(self, load: RouterLoad) -> None:
        """Add the router load of a forward pass to the metrics that ``report`` returns."""
        self._num_tokens += load.num_tokens
        for layer in load.chosen:
            self._chosen_NE[layer] += load.chosen[layer].cpu().numpy()
            self._probs_NE[layer] += load.probs[layer].detach().cpu().numpy()
            self._entropy += float(load.entropy[layer])

    def report(self, collective: Collective) -> dict[str, float]:
        """Return metrics of the forward passes on all ranks since the last call; {} if there were none.

        `moe/load/<expert>` is the expert's share of all assignments, averaged over layers, times E: 1 is even.
        `moe/load_max` and `moe/load_min` are the extremes over layers and experts. `moe/router_entropy` is in nats,
        `moe/aux_loss` the load-balancing loss averaged over layers, without its coefficient.
        """
        sums = collective.sum({"tokens": self._num_tokens, "entropy": self._entropy})
        chosen_NE, probs_NE = _summed(self._chosen_NE, collective), _summed(self._probs_NE, collective)
        self.clear()
        tokens = sums["tokens"]
        if not tokens:
            return {}
        load_NE = chosen_NE / (tokens * self._top_k) * self.num_experts
        return {
            "moe/aux_loss": float((load_NE * probs_NE / tokens).sum(1).mean()),
            "moe/router_entropy": sums["entropy"] / (tokens * self.num_layers),
            "moe/load_max": float(load_NE.max()),
            "moe/load_min": float(load_NE.min()),
            **{f"moe/load/{expert}": float(load) for expert, load in enumerate(load_NE.mean(0))},
        }

    def clear(self) -> None:
        """Reset all counts, because an aborted update may have left counts."""
        self._counted_NE = self._zeros()
        self._num_tokens, self._entropy = 0, 0.0
        self._chosen_NE, self._probs_NE = self._zeros(), self._zeros()

    def _zeros(self) -> Floats:
        return np.zeros((self.num_layers, self.num_experts))


def _summed(values_NE: Floats, collective: Collective) -> Floats:
    names = [str(i) for i in range(values_NE.size)]
    sums = collective.sum(dict(zip(names, values_NE.ravel().tolist(), strict=True)))
    return np.array([sums[name] for name in names]).reshape(values_NE.shape)
