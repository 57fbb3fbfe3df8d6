"""The losses of SAC against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.shared.algorithms.sac import (
    sac_actor_loss,
    sac_critic_loss,
    sac_targets,
    sac_temperature_loss,
    soft_update,
)


def test_targets_bootstrap_unless_the_task_ended() -> None:
    """A transition that was cut off is not terminated, so its future counts."""
    targets = sac_targets(
        torch.tensor([1.0, 1.0]),
        torch.tensor([False, True]),
        torch.tensor([[3.0, math.nan], [2.0, math.nan]]),
        torch.tensor([-0.5, math.nan]),
        gamma=0.9,
        alpha=torch.tensor(0.2, requires_grad=True),
    )
    assert targets.tolist() == pytest.approx([1 + 0.9 * (2.0 + 0.1), 1.0])
    assert not targets.requires_grad


def test_critic_and_actor_loss() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0]], requires_grad=True)
    assert sac_critic_loss(values, torch.tensor([1.0, 1.0])).tolist() == [2.0, 1.0]
    alpha = torch.tensor(0.5, requires_grad=True)
    loss = sac_actor_loss(torch.tensor([-1.0, -2.0]), values, alpha=alpha)
    assert loss.tolist() == [-1.5, -1.0]
    gradient = torch.autograd.grad(loss.sum(), values)[0]
    assert gradient.tolist() == [[-1.0, 0.0], [0.0, -1.0]]


def test_the_temperature_rises_while_the_entropy_is_too_low() -> None:
    log_alpha = torch.tensor(0.0, requires_grad=True)
    for logprob, sign in ((1.0, -1), (-5.0, 1)):
        loss = sac_temperature_loss(log_alpha, torch.full((4,), logprob), target_entropy=1.0)
        (gradient,) = torch.autograd.grad(loss.mean(), log_alpha)
        assert math.copysign(1, gradient.item()) == sign
    balanced = sac_temperature_loss(log_alpha, torch.full((4,), -1.0), target_entropy=1.0)
    assert balanced.tolist() == [0.0] * 4


def test_soft_update() -> None:
    target, source = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0], requires_grad=True)
    soft_update([target], [source], tau=0.25)
    assert target.tolist() == [0.25, 1.0]
    assert not target.requires_grad
    with pytest.raises(ValueError, match="shorter"):
        soft_update([target], [], tau=0.5)
