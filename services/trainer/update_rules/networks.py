"""Small networks that every rank holds whole, each with its optimizer; gradients are summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from penstock.services.trainer.batch.statistics import optimizer_facts
from penstock.services.trainer.optimizer import Optimizer, copy_into
from penstock.services.trainer.ranks.collective import Collective
from penstock.services.trainer.schedule import learning_rate
from penstock.services.trainer.update_rules.on_policy import NonFiniteStep
from penstock.shared.config.optimizer import OptimizerConfig

__all__ = ["TrainedNetworks"]


class TrainedNetworks:
    """Named networks of an update rule. All ranks start from the same weights and stay bit-identical.

    Args:
        networks: networks by name, each with its optimizer config.
        collective: ranks that share a batch.
        total_updates: length of the run for the learning-rate schedules.
        on_nonfinite: action on a loss or gradient that is not finite.
    """

    def __init__(
        self,
        networks: Mapping[str, tuple[nn.Module, OptimizerConfig]],
        collective: Collective,
        *,
        total_updates: int | None,
        on_nonfinite: Literal["pause", "skip"],
    ) -> None:
        self._networks = {
            name: _Network(name, module, config, collective) for name, (module, config) in networks.items()
        }
        self._total_updates, self._on_nonfinite = total_updates, on_nonfinite

    def begin(self, update_index: int) -> None:
        """Start update ``update_index``: set learning rates and reset statistics."""
        for network in self._networks.values():
            network.begin(update_index, self._total_updates)

    def step(self, name: str, loss: Tensor) -> None:
        """Make one optimizer step of one network on the sum of all ranks' ``loss``. Other networks get no gradient.

        Raises:
            NonFiniteStep: the loss or a gradient is not finite on any rank, and ``on_nonfinite`` is ``pause``.
        """
        changed = any(network.num_made for network in self._networks.values())
        problem = self._networks[name].step(loss)
        if problem and self._on_nonfinite == "pause":
            raise NonFiniteStep(problem, changed=changed)

    def report(self) -> dict[str, float]:
        """Return mean loss, learning rate, steps and gradient norm of each network, and the number of skipped steps."""
        facts = {"optimizer/skipped_steps": float(sum(network.num_skipped for network in self._networks.values()))}
        for network in self._networks.values():
            facts |= network.report()
        return facts

    def state(self, *, without: str) -> dict[str, Tensor]:
        """Return copies, on the CPU, of the weights and optimizer states that ``tensors`` returns."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors(without=without).items()}

    def load_state(self, state: Mapping[str, Tensor], *, without: str, what: str) -> None:
        """Restore what ``state`` returned; ``what`` names the rule in the error.

        Raises:
            CheckpointError: the state belongs to other networks; nothing was loaded.
        """
        copy_into(self.tensors(without=without), state, what=what)

    def tensors(self, *, without: str) -> dict[str, Tensor]:
        """Return the weights and optimizer states of all networks by name: the tensors themselves, not copies. The
        network named ``without`` is included with its optimizer state only."""
        return {
            name: tensor
            for network in self._networks.values()
            for name, tensor in network.tensors(weights=network.name != without).items()
        }


class _Network:
    def __init__(self, name: str, module: nn.Module, config: OptimizerConfig, collective: Collective) -> None:
        self.name, self._module, self._config, self._collective = name, module, config, collective
        self._params = list(module.parameters())
        self._optimizer = Optimizer(module, config)
        self._rate = 0.0
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self.num_skipped = 0

    @property
    def num_made(self) -> int:
        return len(self._losses)

    def begin(self, update_index: int, total_updates: int | None) -> None:
        self._rate = learning_rate(self._config, update_index, total_updates)
        self._losses, self._grad_norms, self.num_skipped = [], [], 0

    def step(self, loss: Tensor) -> str:
        """Make one step. Return '' on success, else a description of the non-finite value; in that case nothing
        changes."""
        torch.autograd.backward(loss, inputs=self._params)
        total = self._sum_over_ranks(float(loss.detach()))
        if not math.isfinite(total):
            for gradient in self._gradients():
                gradient.zero_()
            self.num_skipped += 1
            return f"the loss of the {self.name} is {total}"
        norm = self._optimizer.step(self._rate)
        if not math.isfinite(norm):
            self.num_skipped += 1
            return f"the gradient of the {self.name} has norm {norm}"
        self._losses.append(total)
        self._grad_norms.append(norm)
        return ""

    def report(self) -> dict[str, float]:
        facts = optimizer_facts(self.name, self._rate, self._grad_norms)
        return facts | ({f"loss/{self.name}": sum(self._losses) / len(self._losses)} if self._losses else {})

    def tensors(self, *, weights: bool) -> dict[str, Tensor]:
        params = dict(self._module.named_parameters()) if weights else {}
        moments = {f"optimizer.{name}": value for name, value in self._optimizer.tensors().items()}
        return {f"{self.name}.{name}": tensor.detach() for name, tensor in (params | moments).items()}

    def _sum_over_ranks(self, loss: float) -> float:
        """Replace the gradients by their sums over ranks, added in rank order, and return the sum of the losses."""
        if self._collective.size == 1:
            return loss
        gradients = self._gradients()
        flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu().numpy()
        parts = self._collective.gather({"gradient": flat, "loss": np.array([loss])})
        total = torch.from_numpy(np.sum([part["gradient"] for part in parts], axis=0))
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, summed in zip(gradients, torch.split(total, sizes), strict=True):
            gradient.copy_(summed.view_as(gradient))
        return float(sum(part["loss"][0] for part in parts))

    def _gradients(self) -> list[Tensor]:
        gradients = [param.grad for param in self._params if param.grad is not None]
        assert len(gradients) == len(self._params), "the optimizer keeps a gradient of every parameter"
        return gradients
