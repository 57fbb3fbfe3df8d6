"""Distributions of actions against torch.distributions, in the limits of floating point, and as functions of noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from penstock.shared.models.distributions import (
    categorical_entropy,
    categorical_logprobs,
    choose,
    gaussian_entropy,
    gaussian_logprobs,
    squashed_logprobs,
    squashed_sample,
)


@pytest.fixture
def policy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, log standard deviation and standard normal noise of 5 actions, [5, 3] each."""
    generator = torch.Generator().manual_seed(1)
    mean, log_std, noise = torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)
    return mean.requires_grad_(), (0.3 * log_std).requires_grad_(), noise


def test_gaussian(policy: tuple[torch.Tensor, ...]) -> None:
    mean, log_std, noise = policy
    expected = Normal(mean, log_std.exp())
    torch.testing.assert_close(gaussian_logprobs(noise, mean, log_std), expected.log_prob(noise))
    torch.testing.assert_close(gaussian_entropy(log_std), expected.entropy())


def test_squashed_gaussian(policy: tuple[torch.Tensor, ...]) -> None:
    mean, log_std, noise = policy
    expected = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1)])
    actions, logprobs = squashed_sample(mean, log_std, noise)
    torch.testing.assert_close(logprobs, expected.log_prob(actions), rtol=1e-8, atol=1e-8)
    assert torch.autograd.gradcheck(lambda m, s: squashed_sample(m, s, noise), (mean, log_std))


def test_the_density_of_a_saturated_action_is_finite() -> None:
    raw = torch.tensor([50.0, -50.0], requires_grad=True)
    logprobs = squashed_logprobs(raw, torch.zeros(2), torch.zeros(2))
    expected = -1250 - math.log(2 * math.pi) / 2 - 2 * (math.log(2) - 50)
    assert logprobs.tolist() == pytest.approx([expected] * 2, rel=1e-6)
    (gradient,) = torch.autograd.grad(logprobs.sum(), raw)
    assert gradient.isfinite().all()


def test_the_density_integrates_to_1() -> None:
    raw = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    mean, log_std = torch.tensor(0.3, dtype=torch.float64), torch.tensor(-0.2, dtype=torch.float64)
    density = squashed_logprobs(raw, mean, log_std).exp()
    assert torch.trapezoid(density, torch.tanh(raw)).item() == pytest.approx(1, abs=1e-6)


def test_categorical() -> None:
    logits = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    choices = torch.arange(8).reshape(4, 2) % 6
    expected = Categorical(logits=logits)
    torch.testing.assert_close(categorical_logprobs(choices, logits), expected.log_prob(choices))
    torch.testing.assert_close(categorical_entropy(logits), expected.entropy())


def test_each_action_is_drawn_in_proportion_to_its_probability() -> None:
    """A uniform grid of noise hits each action in proportion to its part of [0, 1), within one point of the grid."""
    logits = torch.tensor([1.0, -2.0, 0.5, -torch.inf, 3.0])
    count = 10_000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = torch.bincount(choose(logits.expand(count, 5), grid), minlength=5)
    np.testing.assert_allclose(found, count * logits.softmax(0), atol=1.01)
    assert found[3] == 0, "an action without probability is never drawn"


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_action() -> None:
    logits = torch.randn(100, 7, generator=torch.Generator().manual_seed(3))
    assert (choose(logits, torch.zeros(100)) == 0).all()
    last = torch.full((100,), 1 - 2**-53, dtype=torch.float64)
    assert (choose(logits, last) == 6).all()
