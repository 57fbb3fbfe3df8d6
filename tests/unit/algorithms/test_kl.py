"""KL of small categorical policies: estimators against exact values, by enumeration, without sampling."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from penstock.shared.algorithms.kl import full_kl, k1, k2, k3
from penstock.shared.algorithms.kl_control import adapt_kl_coef


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    policy = torch.randn(1, 7, generator=generator, dtype=torch.float64)
    reference = policy + 0.5 * torch.randn(1, 7, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference


def exact(policy: Tensor, reference: Tensor) -> Tensor:
    return kl_divergence(Categorical(logits=policy), Categorical(logits=reference)).sum()


def gradient_of(value: Tensor, policy: Tensor) -> Tensor:
    return torch.autograd.grad(value, policy)[0]


def test_full_kl_is_that_of_torch(logits: tuple[Tensor, Tensor]) -> None:
    policy, reference = logits
    torch.testing.assert_close(full_kl(policy, reference).sum(), exact(policy, reference))
    assert torch.autograd.gradcheck(lambda p: full_kl(p, reference), (policy,))


def test_a_token_that_cannot_be_drawn_counts_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    assert full_kl(logits, torch.zeros(1, 3)).item() == pytest.approx(math.log(1.5))


def test_k1_and_k3_are_unbiased(logits: tuple[Tensor, Tensor]) -> None:
    policy, reference = (values.log_softmax(-1) for values in logits)
    expected = exact(*logits)
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), expected)


def test_the_gradient_of_each_estimator_as_a_loss(logits: tuple[Tensor, Tensor]) -> None:
    """The test takes expectations over tokens of the current policy, through whose choice no gradient flows."""
    policy, reference = logits
    drawn = policy.softmax(-1).detach()

    def expected_gradient(estimator: object) -> Tensor:
        value = estimator(policy.log_softmax(-1), reference.log_softmax(-1))  # type: ignore[operator]
        return gradient_of((drawn * value).sum(), policy)

    torch.testing.assert_close(expected_gradient(k1), torch.zeros_like(policy), rtol=0, atol=1e-12)
    torch.testing.assert_close(expected_gradient(k2), gradient_of(exact(policy, reference), policy))
    torch.testing.assert_close(expected_gradient(k3), gradient_of(exact(reference, policy), policy))


def test_k1_as_a_reward_has_the_gradient_of_the_kl(logits: tuple[Tensor, Tensor]) -> None:
    policy, reference = logits

    def as_reward(estimator: object) -> Tensor:
        logprobs = policy.log_softmax(-1)
        drawn = logprobs.exp().detach()
        reward = estimator(logprobs, reference.log_softmax(-1)).detach()  # type: ignore[operator]
        return gradient_of((drawn * reward * logprobs).sum(), policy)

    true_gradient = gradient_of(exact(policy, reference), policy)
    torch.testing.assert_close(as_reward(k1), true_gradient)
    assert not torch.allclose(as_reward(k3), true_gradient, atol=1e-3)


def test_k3_stays_finite() -> None:
    far = k3(torch.tensor([-1000.0, 0.0]), torch.tensor([0.0, -1000.0]))
    assert far.tolist() == [10.0, 10.0]


def test_the_controller_follows_its_target() -> None:
    def step(kl: float) -> float:
        return adapt_kl_coef(0.2, kl, target=6.0, horizon=1000, num_sequences=100)

    assert step(6.0) == 0.2
    assert step(6.6) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert step(600.0) == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    assert step(0.0) == pytest.approx(0.2 * (1 - 0.2 * 0.1))
    assert adapt_kl_coef(0.2, 0.0, target=6.0, horizon=1, num_sequences=100) == 0.0
    assert [step(kl) for kl in (math.nan, math.inf, -math.inf)] == [0.2] * 3, "nothing to steer by"
