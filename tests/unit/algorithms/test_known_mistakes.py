"""Mistakes found in other implementations of the same formulas. Each test fails on code that makes the mistake."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.shared.algorithms.advantages import grpo_advantages, reinforce_pp_baseline_advantages
from penstock.shared.algorithms.aggregation import aggregate
from penstock.shared.algorithms.cispo import cispo_loss
from penstock.shared.algorithms.credit import at_last_token
from penstock.shared.algorithms.gae import gae
from penstock.shared.algorithms.importance import masked_weights, truncated_weights
from penstock.shared.algorithms.kl import k1, k3
from penstock.shared.algorithms.overlong import soft_overlong_punishment
from penstock.shared.algorithms.policy_loss import clipped_ratio_loss, dual_clipped_ratio_loss, weighted
from penstock.shared.algorithms.returns import discounted_returns
from penstock.shared.algorithms.sac import sac_targets
from penstock.shared.algorithms.statistics import moments, whiten
from penstock.shared.models.distributions import gaussian_logprobs


def test_reinforce_pp_with_a_tool_before_the_first_scored_token() -> None:
    """The end of a trajectory was searched in a flipped batch, which is right only if every mask starts at token 0."""
    mask, cu_seqlens = torch.tensor([0, 0, 1, 1, 1, 1, 0]), torch.tensor([0, 4, 7])
    rewards = at_last_token(torch.tensor([1.0, 2.0]), mask, cu_seqlens)
    returns = discounted_returns(rewards, mask, cu_seqlens, gamma=1.0)
    assert returns.tolist() == [0, 0, 1, 1, 2, 2, 0]


def test_reinforce_pp_baseline_runs() -> None:
    """The baseline variant raised an IndexError on every input."""
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    result = reinforce_pp_baseline_advantages(rewards, groups, torch.ones(4) > 0, torch.tensor([2, 2, 5, 1]))
    assert result[0] > 0 > result[1]
    assert not result[2:].any()


def test_the_reward_is_not_on_padding() -> None:
    """The reward stood in the last padded column: a short trajectory lost it, or saw it discounted by padding."""
    mask, cu_seqlens = torch.tensor([1, 1, 1, 1]), torch.tensor([0, 1, 4])
    rewards = at_last_token(torch.tensor([1.0, 1.0]), mask, cu_seqlens)
    assert discounted_returns(rewards, mask, cu_seqlens, gamma=0.5).tolist() == [1.0, 0.25, 0.5, 1.0]


def test_kl_estimates_the_divergence_from_the_reference_not_to_it() -> None:
    """One backend called the estimator with its arguments swapped: k1 changed its sign, k3 its meaning."""
    policy, reference = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    divergence = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), divergence)
        assert not torch.isclose((policy.exp() * estimator(reference, policy)).sum(), divergence, atol=0.01)


def test_gae_is_normalised_over_the_whole_batch_not_each_rank() -> None:
    """Each rank whitened its advantages alone, so the result depended on the number of ranks."""
    advantages, mask = torch.tensor([1.0, 2.0, 10.0, 20.0]), torch.ones(4)
    whole = whiten(advantages, mask, moments(advantages, mask))
    pooled = moments(advantages[:2], mask[:2]) + moments(advantages[2:], mask[2:])
    ranks = torch.cat([whiten(part, torch.ones(2), pooled) for part in advantages.split(2)])
    assert torch.equal(whole, ranks)
    alone = torch.cat([whiten(part, torch.ones(2), moments(part, torch.ones(2))) for part in advantages.split(2)])
    assert not torch.allclose(whole, alone, atol=0.1)


def test_masked_tokens_change_no_statistic_of_advantages() -> None:
    """Advantage statistics ignored the mask."""
    mask = torch.tensor([1, 0, 1])
    assert moments(torch.tensor([1.0, 100.0, 3.0]), mask) == moments(torch.tensor([1.0, 3.0]), torch.ones(2))


def test_the_bootstrap_skips_observations() -> None:
    """GAE took the value of an observation's token as that of the next state, and counted its reward and discount."""
    mask, cu_seqlens = torch.tensor([1, 0, 0, 1]), torch.tensor([0, 4])
    values, rewards = torch.tensor([1.0, 50.0, math.nan, 2.0]), torch.tensor([0.0, 50.0, math.nan, 3.0])
    advantages, returns = gae(rewards, values, mask, cu_seqlens, gamma=0.5, lam=0.5, bootstrap_B=torch.zeros(1))
    assert advantages.tolist() == [0 + 0.5 * 2 - 1 + 0.25 * (3 - 2), 0, 0, 1]
    assert returns.tolist() == [1.25, 0, 0, 3]


@pytest.mark.parametrize(("bootstrap", "expected"), [(0.0, -1.0), (4.0, 1.0)])
def test_a_truncated_trajectory_has_a_future_and_a_terminated_one_has_none(bootstrap: float, expected: float) -> None:
    advantages, _ = gae(
        torch.zeros(1),
        torch.ones(1),
        torch.ones(1),
        torch.tensor([0, 1]),
        gamma=0.5,
        lam=0.95,
        bootstrap_B=torch.tensor([bootstrap]),
    )
    assert advantages.item() == expected


def test_sac_bootstraps_over_a_time_limit() -> None:
    arguments = (torch.zeros(1), torch.full((2, 1), 10.0), torch.zeros(1))
    cut_off = sac_targets(arguments[0], torch.tensor([False]), *arguments[1:], gamma=0.8, alpha=torch.tensor(0.1))
    assert cut_off.item() == pytest.approx(8.0)


def test_the_dual_clip_has_an_effect() -> None:
    """The key of the dual clip existed in 135 job files, but the loss ignored it."""
    arguments = (torch.tensor([3.0]), torch.zeros(1), torch.tensor([-1.0]))
    plain = clipped_ratio_loss(*arguments, clip_low=0.2, clip_high=0.2).loss_M.item()
    assert plain == pytest.approx(math.exp(3))
    dual = dual_clipped_ratio_loss(*arguments, clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss_M.item()
    assert dual == 3.0


def test_soft_punishment_exists_and_never_rewards_length() -> None:
    """The punishment was documented, but no code read its key."""
    punished = soft_overlong_punishment(torch.arange(0, 30), max_length=20, buffer=10)
    assert punished[:11].tolist() == [0.0] * 11
    assert (punished.diff() <= 0).all()
    assert punished[20:].tolist() == [-1.0] * 10


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_a_microbatch_does_not_set_its_own_denominator(mode: str) -> None:
    """Means of microbatches were averaged: tokens beside short neighbours weighed more."""
    values, lengths = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 3.0, 3.0])

    def of(v: Tensor, n: Tensor) -> Tensor:
        return aggregate(mode, v, n, num_tokens=4, num_sequences=2, horizon=8)  # type: ignore[arg-type]

    assert of(values[:1], lengths[:1]) + of(values[1:], lengths[1:]) == of(values, lengths)


def test_the_density_of_an_action_is_a_sum_over_its_dimensions_once() -> None:
    """Losses of single dimensions were divided by the number of actions: they grew with the number of dimensions."""
    one = gaussian_logprobs(torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4, 1)).sum(-1)
    seven = gaussian_logprobs(torch.zeros(4, 7), torch.zeros(4, 7), torch.zeros(4, 7)).sum(-1)
    assert seven.shape == (4,)
    torch.testing.assert_close(seven, 7 * one)
    ratio_loss = clipped_ratio_loss(seven, seven, torch.ones(4), clip_low=0.2, clip_high=0.2)
    assert ratio_loss.loss_M.mean().item() == -1.0


def test_a_group_mask_of_zeros_is_no_group() -> None:
    """A missing loss mask crashed the group statistics; here a group without valid completions teaches nothing."""
    nothing = grpo_advantages(torch.ones(3), torch.zeros(3, dtype=torch.long), torch.zeros(3) > 0, scale_by_std=True)
    assert nothing.tolist() == [0.0, 0.0, 0.0]


def test_weights_carry_no_gradient() -> None:
    """A weight that is differentiated turns truncated importance sampling into another loss."""
    policy = torch.tensor([0.3, -0.4], requires_grad=True)
    behaviour = torch.zeros(2)
    for weights in (truncated_weights(policy - behaviour, high=2.0), masked_weights(policy, low=0.5, high=2.0)):
        assert not weights.requires_grad
    loss = weighted(cispo_loss(policy, behaviour, torch.ones(2), clip_low=1.0, clip_high=4.0), policy.exp())
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    torch.testing.assert_close(gradient, -(2 * policy).exp().detach())


def test_one_overflowing_token_does_not_poison_the_batch() -> None:
    """exp of a large difference gave inf, and inf times an advantage of 0 gave NaN."""
    policy = torch.tensor([200.0, 0.0], requires_grad=True)
    loss = clipped_ratio_loss(
        policy, torch.tensor([-200.0, 0.0]), torch.tensor([0.0, 1.0]), clip_low=0.2, clip_high=0.2
    )
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), policy)
    assert loss.loss_M.isfinite().all()
    assert gradient.tolist() == [0.0, -1.0]
