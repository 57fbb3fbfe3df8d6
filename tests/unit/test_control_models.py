"""The small networks of continuous control: bounds, independence, first weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from penstock.shared.errors import ConfigError
from penstock.shared.models.control import GaussianPolicy, SquashedPolicy, TwinCritics, ValueNetwork, to_bounds


def test_actions_are_scaled_to_the_bounds() -> None:
    actions = torch.tensor([[-1.0, -1.0], [0.0, 0.5], [1.0, 1.0]])
    assert to_bounds(actions, [-2, 0], [2, 10]).tolist() == [[-2, 0], [0, 7.5], [2, 10]]
    for low, high in (([-math.inf, 0], [1, 1]), ([0, 1], [1, 1]), ([-3e38, 0], [3e38, 1])):
        with pytest.raises(ConfigError, match="needs finite bounds of every dimension"):
            to_bounds(actions, low, high)


def test_deviations_stay_within_their_limits() -> None:
    policy = SquashedPolicy(3, 2, [8])
    far = 1e4 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    _, log_std = policy(far)
    assert log_std.min() >= -5
    assert log_std.max() <= 2


def test_twin_critics_share_nothing() -> None:
    critics = TwinCritics(3, 2, [8])
    values = critics(torch.ones(4, 3), torch.ones(4, 2))
    assert values.shape == (2, 4)
    assert not torch.equal(values[0], values[1])
    first, second = (list(critic.parameters()) for critic in critics.critics)
    values[0].sum().backward()
    assert any(param.grad is not None and param.grad.any() for param in first)
    assert not any(param.grad is not None and param.grad.any() for param in second)


def test_first_weights_are_orthogonal() -> None:
    policy, value = GaussianPolicy(6, 3, [16], initial_log_std=-0.5), ValueNetwork(6, [16])
    for network, gain in ((policy, 0.01), (value, 1.0)):
        first, last = (layer.weight for layer in network.layers if isinstance(layer, nn.Linear))
        torch.testing.assert_close(first.T @ first, 2 * torch.eye(6), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last @ last.T, gain**2 * torch.eye(len(last)), rtol=1e-4, atol=1e-7)
    mean, log_std = policy(torch.ones(5, 6))
    assert mean.shape == (5, 3)
    assert log_std.shape == (5, 3)
    assert (log_std == -0.5).all()
    assert value(torch.ones(5, 6)).shape == (5,)
