"""Losses of policy, critic and preferences: closed forms and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from penstock.shared.algorithms.aggregation import sequence_mean
from penstock.shared.algorithms.cispo import cispo_loss
from penstock.shared.algorithms.gspo import gspo_loss
from penstock.shared.algorithms.importance import (
    decoupled_loss,
    masked_weights,
    sequence_log_ratio,
    truncated_weights,
)
from penstock.shared.algorithms.policy_loss import (
    clipped_ratio_loss,
    dual_clipped_ratio_loss,
    policy_gradient_loss,
    weighted,
)
from penstock.shared.algorithms.statistics import moments
from penstock.shared.algorithms.supervised import dpo_loss, sequence_logprobs, supervised_loss
from penstock.shared.algorithms.trust_region import dppo_loss, gmpo_loss, sapo_loss
from penstock.shared.algorithms.value_loss import (
    clipped_value_loss,
    explained_variance,
    huber_error,
    squared_error,
    value_loss,
)

ROWS = torch.tensor([0, 0, 0, 2, 2, 5])
LENGTHS = torch.tensor([3.0, 3, 3, 2, 2, 1], dtype=torch.float64)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
OF_TOKENS: dict[str, Callable[..., Tensor]] = {
    "clip": lambda *a: clipped_ratio_loss(*a, **CLIP).loss_M,
    "dual_clip": lambda *a: dual_clipped_ratio_loss(*a, **CLIP, dual_clip=2.0).loss_M,
    "policy_gradient": lambda *a: policy_gradient_loss(*a).loss_M,
    "gspo": lambda *a: gspo_loss(*a, ROWS, **CLIP).loss_M,
    "cispo": lambda *a: cispo_loss(*a, **CLIP).loss_M,
    "sapo": lambda *a: sapo_loss(*a, tau_positive=1.0, tau_negative=1.05).loss_M,
    "dppo": lambda *a: dppo_loss(*a, divergence_low=0.2, divergence_high=0.2, max_weight=3.0).loss_M,
    "decoupled": lambda p, b, a: decoupled_loss(p, b, b, a, **CLIP, high=2.0).loss_M,
}


def draw(seed: int, *, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Draw log-probs of the policy and of the behaviour, and advantages that are equal within a trajectory."""
    generator = torch.Generator().manual_seed(seed)
    behaviour = -2 * torch.rand(6, generator=generator, dtype=torch.float64) - 0.1
    policy = behaviour + spread * torch.randn(6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)[ROWS]
    return policy.requires_grad_(), behaviour, advantages


@pytest.mark.parametrize("name", OF_TOKENS)
def test_at_ratio_1_the_gradient_is_the_policy_gradient(name: str) -> None:
    policy, _, advantages = draw(0)
    (gradient,) = torch.autograd.grad(OF_TOKENS[name](policy, policy.detach(), advantages).sum(), policy)
    torch.testing.assert_close(gradient, -advantages, rtol=0, atol=1e-12)


def test_at_ratio_1_the_geometric_mean_has_the_gradient_of_the_sequence_mean() -> None:
    policy, _, advantages = draw(0)
    loss = sequence_mean(gmpo_loss(policy, policy.detach(), advantages, ROWS, **CLIP).loss_M, LENGTHS, num_sequences=3)
    (gradient,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(gradient, -advantages / LENGTHS / 3, rtol=0, atol=1e-12)


DIFFERENTIABLE = {name: OF_TOKENS[name] for name in ("clip", "dual_clip", "policy_gradient", "sapo")}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("seed", range(4))
def test_gradcheck(name: str, seed: int) -> None:
    policy, behaviour, advantages = draw(seed, spread=0.8)
    assert torch.autograd.gradcheck(lambda p: DIFFERENTIABLE[name](p, behaviour, advantages).sum(), (policy,))


def test_gradcheck_of_the_geometric_mean() -> None:
    policy, behaviour, advantages = draw(3, spread=0.8)
    assert torch.autograd.gradcheck(lambda p: gmpo_loss(p, behaviour, advantages, ROWS, **CLIP).loss_M.sum(), (policy,))


def test_gspo_has_the_value_and_the_gradient_of_the_sequence_ratio() -> None:
    """The expected loss follows the definition: one ratio per sequence, differentiated as a whole."""
    policy, behaviour, advantages = draw(1, spread=0.1)
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    ours = sequence_mean(gspo_loss(policy, behaviour, advantages, ROWS, **wide).loss_M, LENGTHS, num_sequences=3)
    expected = torch.zeros((), dtype=torch.float64)
    for row in (0, 2, 5):
        of_row = row == ROWS
        ratio = (policy - behaviour)[of_row].mean().exp()
        expected = expected - ratio * advantages[of_row][0] / 3
    torch.testing.assert_close(ours, expected)
    (gradient,) = torch.autograd.grad(ours, policy)
    (expected_gradient,) = torch.autograd.grad(expected, policy)
    torch.testing.assert_close(gradient, expected_gradient)


def test_gspo_gives_each_token_its_own_advantage() -> None:
    policy, behaviour, _ = draw(1, spread=0.1)
    advantages = torch.linspace(-1, 1, 6, dtype=torch.float64)
    loss = gspo_loss(policy, behaviour, advantages, ROWS, clip_low=0.9, clip_high=9.0)
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    torch.testing.assert_close(gradient, -advantages * loss.ratio_M)


def test_gspo_cuts_whole_sequences() -> None:
    policy = torch.tensor([0.5, 0.0, 0.5, 0.0, -0.9, 0.0]).requires_grad_()
    advantages = torch.tensor([1.0, 1, 1, -1, -1, 1])
    loss = gspo_loss(policy, torch.zeros(6), advantages, ROWS, **CLIP)
    assert loss.clipped_high_M.tolist() == [True, True, True, False, False, False]
    assert loss.clipped_low_M.tolist() == [False, False, False, True, True, False]
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    assert gradient.tolist() == [0, 0, 0, 0, 0, -1]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    policy = torch.tensor([1.0, -1.0, 0.1]).requires_grad_()
    loss = cispo_loss(policy, torch.zeros(3), torch.tensor([1.0, 1.0, -2.0]), **CLIP)
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    torch.testing.assert_close(gradient, torch.tensor([-1.28, -0.8, 2 * math.exp(0.1)]))
    assert loss.clipped_high_M.tolist() == [True, False, False]
    assert loss.clipped_low_M.tolist() == [False, True, False]


def test_the_dual_clip_bounds_bad_tokens_only() -> None:
    policy = torch.tensor([2.0, 2.0, 0.5]).requires_grad_()
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    loss = dual_clipped_ratio_loss(policy, torch.zeros(3), advantages, **CLIP, dual_clip=3.0)
    torch.testing.assert_close(loss.loss_M, torch.tensor([3.0, -1.28, math.exp(0.5)]))
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, math.exp(0.5)]))
    assert loss.clipped_high_M.tolist() == [True, True, False]


def test_dppo_lets_a_rare_token_change_its_ratio() -> None:
    """Both ratios are 3: 1 % to 3 % is a small change of the policy, 20 % to 60 % is not."""
    behaviour = torch.tensor([0.01, 0.2]).log()
    policy = (behaviour + math.log(3)).requires_grad_()
    loss = dppo_loss(policy, behaviour, torch.ones(2), divergence_low=0.2, divergence_high=0.2, max_weight=10.0)
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    torch.testing.assert_close(gradient, torch.tensor([-3.0, 0.0]))


def test_importance_weights() -> None:
    log_ratio = torch.tensor([0.0, 1.0, -1.0])
    torch.testing.assert_close(truncated_weights(log_ratio, high=2.0), torch.tensor([1.0, 2.0, math.exp(-1)]))
    assert masked_weights(log_ratio, low=0.5, high=2.0).tolist() == [1.0, 0.0, 0.0]
    of_sequences = sequence_log_ratio(torch.tensor([0.1, 0.2, 0.3, 1, 2, -40.0]), torch.zeros(6), ROWS)
    torch.testing.assert_close(of_sequences, torch.tensor([0.6, 0.6, 0.6, 3, 3, -20]))


def test_no_gradient_flows_through_a_weight() -> None:
    policy, behaviour, advantages = draw(2)
    weights = truncated_weights(policy - behaviour, high=9.0)
    assert not weights.requires_grad
    loss = weighted(clipped_ratio_loss(policy, policy.detach(), advantages, **CLIP), (policy - behaviour).exp())
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    torch.testing.assert_close(gradient, -advantages * (policy - behaviour).detach().exp())


def test_decoupled_clips_around_the_proximal_policy() -> None:
    """The policy equals the proximal one: nothing is clipped, however far the behaviour is."""
    policy, _, advantages = draw(4)
    behaviour = policy.detach() - 0.5
    loss = decoupled_loss(policy, policy.detach(), behaviour, advantages, **CLIP, high=9.0)
    assert not (loss.clipped_low_M | loss.clipped_high_M).any()
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    torch.testing.assert_close(gradient, -advantages * math.exp(0.5))


def test_value_losses() -> None:
    values = torch.tensor([0.0, 3.0, -1.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(
        value_loss(values, returns, error=squared_error).detach(), torch.tensor([0.125, 4.5, 0.0]).double()
    )
    huber = partial(huber_error, delta=1.0)
    torch.testing.assert_close(
        value_loss(values, returns, error=huber), huber_loss(values, returns, reduction="none", delta=1.0)
    )
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, error=huber).sum(), (values,))


def test_the_value_clip_stops_what_has_moved_enough() -> None:
    values = torch.tensor([0.5, 0.1, -0.5], requires_grad=True)
    loss = clipped_value_loss(values, torch.zeros(3), torch.ones(3), clip=0.2, error=squared_error)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.9, -1.5]))


def test_explained_variance() -> None:
    returns, every = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4)
    of_returns = moments(returns, every)
    assert explained_variance(moments(returns - returns, every), of_returns) == 1.0
    assert explained_variance(moments(returns - 2.5, every), of_returns) == pytest.approx(0.0)
    assert explained_variance(moments(2 * returns, every), of_returns) == pytest.approx(-3.0)
    assert explained_variance(of_returns, moments(torch.ones(4), every)) == 0.0


def test_sequence_logprobs_and_supervised_loss() -> None:
    logprobs = torch.tensor([-1.0, -2, -3, -4, -6, -7])
    assert sequence_logprobs(logprobs, ROWS, num_rows=6, normalise=False).tolist() == [-6, 0, -10, 0, 0, -7]
    assert sequence_logprobs(logprobs, ROWS, num_rows=6, normalise=True).tolist() == [-2, 0, -5, 0, 0, -7]
    assert supervised_loss(logprobs).tolist() == [1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, ref_chosen, ref_rejected = torch.randn(4, 5, generator=generator, dtype=torch.float64)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return dpo_loss(a, b, ref_chosen, ref_rejected, beta=0.3, label_smoothing=smoothing)

    torch.testing.assert_close(loss(ref_chosen, ref_rejected), torch.full((5,), math.log(2), dtype=torch.float64))
    chosen.requires_grad_()
    rejected.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: loss(a, b).sum(), (chosen, rejected))
    gradient = torch.autograd.grad(loss(chosen, rejected).sum(), (chosen, rejected))
    h = 0.3 * ((chosen - ref_chosen) - (rejected - ref_rejected)).detach()
    expected = 0.3 * (torch.sigmoid(h) - (1 - smoothing))
    torch.testing.assert_close(gradient[0], expected)
    torch.testing.assert_close(gradient[1], -expected)
