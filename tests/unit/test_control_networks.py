"""The small networks beside a policy: independence of the critics, first weights."""

from __future__ import annotations

import torch
from torch import nn

from penstock.shared.config.embodied import EncoderConfig
from penstock.shared.models.control import TwinCritics, ValueNetwork
from penstock.shared.models.observations import ObservationEncoder, Seen


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
    value = ValueNetwork(ObservationEncoder(EncoderConfig(), 6), [16])
    first, last = (layer.weight for layer in value.layers if isinstance(layer, nn.Linear))
    torch.testing.assert_close(first.T @ first, 2 * torch.eye(6), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last @ last.T, torch.eye(1), rtol=1e-4, atol=1e-7)
    assert value(Seen(torch.ones(5, 6))).shape == (5,)
