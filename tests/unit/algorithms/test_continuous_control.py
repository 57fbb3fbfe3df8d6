"""Gaussian policies against torch.distributions, and the losses of SAC against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from penstock.shared.algorithms.gaussian import (
    gaussian_entropy,
    gaussian_logprobs,
    squashed_logprobs,
    squashed_sample,
)
from penstock.shared.algorithms.sac import (
    sac_actor_loss,
    sac_critic_loss,
    sac_targets,
    sac_temperature_loss,
    soft_update,
)


@pytest.fixture
def policy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, log deviation and standard normal noise of 5 actions of 3 dimensions."""
    generator = torch.Generator().manual_seed(1)
    mean, log_std, noise = torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)
    return mean.requires_grad_(), (0.3 * log_std).requires_grad_(), noise


def test_gaussian(policy: tuple[torch.Tensor, ...]) -> None:
    mean, log_std, noise = policy
    expected = Independent(Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(gaussian_logprobs(noise, mean, log_std), expected.log_prob(noise))
    torch.testing.assert_close(gaussian_entropy(log_std), expected.entropy())


def test_squashed_gaussian(policy: tuple[torch.Tensor, ...]) -> None:
    mean, log_std, noise = policy
    expected = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    actions, logprobs = squashed_sample(mean, log_std, noise)
    torch.testing.assert_close(logprobs, expected.log_prob(actions), rtol=1e-8, atol=1e-8)
    assert torch.autograd.gradcheck(lambda m, s: squashed_sample(m, s, noise), (mean, log_std))


def test_the_density_of_a_saturated_action_is_finite() -> None:
    raw = torch.tensor([[50.0, -50.0]], requires_grad=True)
    logprobs = squashed_logprobs(raw, torch.zeros(1, 2), torch.zeros(1, 2))
    expected = 2 * (-1250 - math.log(2 * math.pi) / 2 - 2 * (math.log(2) - 50))
    assert logprobs.item() == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(logprobs.sum(), raw)
    assert gradient.isfinite().all()


def test_the_density_integrates_to_1() -> None:
    raw = torch.linspace(-12, 12, 200_001, dtype=torch.float64)[:, None]
    mean, log_std = torch.full((1,), 0.3, dtype=torch.float64), torch.full((1,), -0.2, dtype=torch.float64)
    density = squashed_logprobs(raw, mean, log_std).exp()
    assert torch.trapezoid(density, torch.tanh(raw[:, 0])).item() == pytest.approx(1, abs=1e-6)


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
