"""Small networks trained beside the policy of an embodied job: critics, value networks, the temperature of SAC.

Shape legend: B = transitions, O = components of an observation, A = components of an action, C = critics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.shared.models.observations import ObservationEncoder, Seen

__all__ = ["Temperature", "TwinCritics", "ValueNetwork", "orthogonal", "perceptron"]


class TwinCritics(nn.Module):
    """Two networks without shared weights, each of which estimates the value of an action in a state."""

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        sizes = [observation_size + action_size, *hidden_sizes, 1]
        self.critics = nn.ModuleList(perceptron(sizes, nn.ReLU) for _ in range(2))

    def forward(self, observations_BO: Tensor, actions_BA: Tensor) -> Tensor:
        """Return each critic's value of each action in its state, [C, B]."""
        both_BI = torch.cat([observations_BO, actions_BA], dim=-1)
        return torch.stack([critic(both_BI)[:, 0] for critic in self.critics])


class Temperature(nn.Module):
    """``alpha = exp(log_alpha)``, the weight of the entropy."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial), dtype=torch.float32))

    def forward(self) -> Tensor:
        """Return alpha, a scalar."""
        return self.log_alpha.exp()


class ValueNetwork(nn.Module):
    """Network that estimates the value of a state; it owns ``encoder``. Its initial weights are orthogonal."""

    def __init__(self, encoder: ObservationEncoder, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.encoder = encoder
        self.layers = orthogonal(perceptron([encoder.num_features, *hidden_sizes, 1], nn.Tanh), last_gain=1.0)

    def forward(self, seen: Seen) -> Tensor:
        """Return the value of each state, [B]."""
        values_B: Tensor = self.layers(self.encoder(seen))[:, 0]
        return values_B


def perceptron(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Build linear layers with the widths ``sizes``, and ``activation`` between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def orthogonal(layers: nn.Sequential, *, last_gain: float) -> nn.Sequential:
    """Initialize ``layers`` with orthogonal weights of gain √2 (last linear layer: ``last_gain``) and zero biases."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for layer in linear:
        nn.init.orthogonal_(layer.weight, last_gain if layer is linear[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return layers
