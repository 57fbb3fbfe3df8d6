"""Small networks for continuous control: policies, critics and the temperature. Actions and observations are vectors.

Shape legend: B = transitions, O = numbers of an observation, A = dimensions of an action, C = critics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.shared.errors import ConfigError

__all__ = [
    "GaussianPolicy",
    "SquashedPolicy",
    "Temperature",
    "TwinCritics",
    "ValueNetwork",
    "orthogonal",
    "perceptron",
    "to_bounds",
]

MIN_LOG_STD, MAX_LOG_STD = -5.0, 2.0
"""Of the squashed policy: between a deviation of 0.007 and one that tanh cuts to the bounds."""


class SquashedPolicy(nn.Module):
    """Actions ``tanh(u)`` in (-1, 1), u Gaussian; mean and deviation depend on the observation (arXiv 1812.05905)."""

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = perceptron([observation_size, *hidden_sizes, 2 * action_size], nn.ReLU)

    def forward(self, observations_BO: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the deviation before the squashing, [B, A] each.

        The logarithm is squashed into [-5, 2], so that its gradient never vanishes at a bound.
        """
        mean_BA, raw_BA = self.layers(observations_BO).chunk(2, dim=-1)
        return mean_BA, MIN_LOG_STD + (MAX_LOG_STD - MIN_LOG_STD) * (torch.tanh(raw_BA) + 1) / 2


class TwinCritics(nn.Module):
    """Two values of an action in a state, from networks that share nothing."""

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        sizes = [observation_size + action_size, *hidden_sizes, 1]
        self.critics = nn.ModuleList(perceptron(sizes, nn.ReLU) for _ in range(2))

    def forward(self, observations_BO: Tensor, actions_BA: Tensor) -> Tensor:
        """Values, [C, B]."""
        both_BI = torch.cat([observations_BO, actions_BA], dim=-1)
        return torch.stack([critic(both_BI)[:, 0] for critic in self.critics])


class Temperature(nn.Module):
    """``alpha = exp(log_alpha)``, the weight of the entropy."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        """alpha, a scalar."""
        return self.log_alpha.exp()


class GaussianPolicy(nn.Module):
    """Gaussian actions whose mean depends on the observation and whose deviation does not.

    Orthogonal weights; those of the last layer are small, so that the first policy is the same everywhere
    (arXiv 2006.05990, §3.2).
    """

    def __init__(
        self, observation_size: int, action_size: int, hidden_sizes: Sequence[int], *, initial_log_std: float
    ) -> None:
        super().__init__()
        self.layers = orthogonal(perceptron([observation_size, *hidden_sizes, action_size], nn.Tanh), last_gain=0.01)
        self.log_std_A = nn.Parameter(torch.full((action_size,), initial_log_std))

    def forward(self, observations_BO: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the deviation, [B, A] each."""
        mean_BA: Tensor = self.layers(observations_BO)
        return mean_BA, self.log_std_A.expand_as(mean_BA)


class ValueNetwork(nn.Module):
    """Value of a state. Orthogonal weights."""

    def __init__(self, observation_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = orthogonal(perceptron([observation_size, *hidden_sizes, 1], nn.Tanh), last_gain=1.0)

    def forward(self, observations_BO: Tensor) -> Tensor:
        """Values, [B]."""
        values_B: Tensor = self.layers(observations_BO)[:, 0]
        return values_B


def to_bounds(actions_BA: Tensor, low: Sequence[float], high: Sequence[float]) -> Tensor:
    """Actions in [-1, 1], scaled to the bounds of an environment.

    Args:
        low, high: of each dimension of the action, in its own units.

    Raises:
        ConfigError: a dimension has no finite bounds.
    """
    low_A, high_A = torch.tensor([low, high], dtype=actions_BA.dtype, device=actions_BA.device)
    if not (low_A < high_A).all() or not (high_A - low_A).isfinite().all():
        raise ConfigError(
            f"actions lie between {list(low)} and {list(high)}: a squashed policy needs finite bounds of every "
            "dimension, low below high; bound the environment's actions, or use an unbounded Gaussian policy"
        )
    scaled_BA: Tensor = low_A + (high_A - low_A) * (actions_BA + 1) / 2
    return scaled_BA


def perceptron(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers of these widths, the activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def orthogonal(layers: nn.Sequential, *, last_gain: float) -> nn.Sequential:
    """``layers`` with orthogonal weights, of gain √2 but for the last linear one, and without biases to begin with."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for layer in linear:
        nn.init.orthogonal_(layer.weight, last_gain if layer is linear[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return layers
