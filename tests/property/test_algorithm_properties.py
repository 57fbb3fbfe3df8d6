"""Laws of advantages, returns and statistics that hold for every batch: ranks, order, masks and scale do not matter."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.shared.algorithms.advantages import (
    grpo_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
)
from penstock.shared.algorithms.baseline import sums_of, track, value_of
from penstock.shared.algorithms.credit import at_last_token, turn_returns, turns, turns_to_tokens
from penstock.shared.algorithms.gae import gae
from penstock.shared.algorithms.gspo import gspo_loss
from penstock.shared.algorithms.importance import masked_weights, truncated_weights
from penstock.shared.algorithms.returns import discounted_returns
from penstock.shared.algorithms.statistics import Moments, moments, whiten

seeds = st.integers(0, 2**32)


def ragged(seed: int, *, masked: float = 0.4) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.Generator]:
    """Return rewards, values, mask, bounds and generator for up to 6 trajectories of up to 9 tokens, some empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 10, (int(torch.randint(1, 7, (), generator=generator)),), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    rewards, values = torch.randn(2, int(cu_seqlens[-1]), generator=generator, dtype=torch.float64)
    mask = torch.rand(len(rewards), generator=generator) >= masked
    return rewards, values, mask, cu_seqlens, generator


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.Generator]:
    """Return rewards, groups, validity, lengths and generator for up to 24 trajectories."""
    generator = torch.Generator().manual_seed(seed)
    number = int(torch.randint(2, 25, (), generator=generator))
    rewards = torch.randint(-4, 5, (number,), generator=generator) / 2
    groups = torch.randint(0, 5, (number,), generator=generator)
    valid = torch.rand(number, generator=generator) > 0.2
    return rewards, groups, valid, torch.randint(0, 9, (number,), generator=generator), generator


@given(seeds)
def test_rloo_is_dr_grpo_times_g_over_g_minus_1(seed: int) -> None:
    rewards, groups, valid, _, _ = batch(seed)
    counts = torch.bincount(groups[valid], minlength=5)[groups].double()
    scale = counts / (counts - 1).clamp_min(1)
    expected = grpo_advantages(rewards, groups, valid, scale_by_std=False) * scale
    torch.testing.assert_close(rloo_advantages(rewards, groups, valid), expected.float())


@given(seeds)
def test_the_order_of_trajectories_does_not_matter(seed: int) -> None:
    rewards, groups, valid, lengths, generator = batch(seed)
    order = torch.randperm(len(rewards), generator=generator)
    for advantages in (
        lambda r, g, v, n: grpo_advantages(r, g, v, scale_by_std=True),
        lambda r, g, v, n: rloo_advantages(r, g, v),
        reinforce_pp_baseline_advantages,
    ):
        straight = advantages(rewards, groups, valid, lengths)
        shuffled = advantages(rewards[order], groups[order], valid[order], lengths[order])
        torch.testing.assert_close(shuffled, straight[order], rtol=1e-5, atol=1e-6)


@given(seeds, st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_no_advantage(seed: int, shift: float) -> None:
    rewards, groups, valid, lengths, _ = batch(seed)
    rewards = rewards.double()
    for advantages in (rloo_advantages, lambda r, g, v: reinforce_pp_baseline_advantages(r, g, v, lengths)):
        torch.testing.assert_close(
            advantages(rewards + shift, groups, valid), advantages(rewards, groups, valid), rtol=1e-5, atol=1e-5
        )


@given(seeds)
def test_masked_values_do_not_leak(seed: int) -> None:
    """NaN in every masked position changes no result, and the advantages there are 0."""
    rewards, values, mask, cu_seqlens, generator = ragged(seed)
    bootstrap = torch.randn(len(cu_seqlens) - 1, generator=generator)
    dirty_rewards, dirty_values = (x.masked_fill(~mask, math.nan) for x in (rewards, values))
    clean = gae(rewards, values, mask, cu_seqlens, gamma=0.9, lam=0.8, bootstrap_B=bootstrap)
    dirty = gae(dirty_rewards, dirty_values, mask, cu_seqlens, gamma=0.9, lam=0.8, bootstrap_B=bootstrap)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert not clean[0][~mask].any()
    assert torch.equal(
        discounted_returns(rewards, mask, cu_seqlens, gamma=0.7),
        discounted_returns(dirty_rewards, mask, cu_seqlens, gamma=0.7),
    )
    assert moments(rewards, mask) == moments(dirty_rewards, mask)
    over = moments(rewards, mask)
    assert torch.equal(whiten(rewards, mask, over), whiten(dirty_rewards, mask, over))


@given(seeds)
def test_masked_tokens_count_like_missing_ones(seed: int) -> None:
    rewards, values, mask, cu_seqlens, _ = ragged(seed)
    bootstrap = torch.ones(len(cu_seqlens) - 1)
    kept = torch.cat([torch.zeros(1, dtype=torch.long), mask.cumsum(0)])[cu_seqlens]
    every = torch.ones(int(kept[-1]))
    with_masked = gae(rewards, values, mask, cu_seqlens, gamma=0.9, lam=0.8, bootstrap_B=bootstrap)
    without = gae(rewards[mask], values[mask], every, kept, gamma=0.9, lam=0.8, bootstrap_B=bootstrap)
    assert all(torch.equal(a[mask], b) for a, b in zip(with_masked, without, strict=True))


@given(seeds)
def test_trajectories_do_not_affect_each_other(seed: int) -> None:
    rewards, values, mask, cu_seqlens, generator = ragged(seed)
    bootstrap = torch.randn(len(cu_seqlens) - 1, generator=generator)
    together, _ = gae(rewards, values, mask, cu_seqlens, gamma=0.99, lam=0.95, bootstrap_B=bootstrap)
    for row, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        own = slice(start, end)
        alone, _ = gae(
            rewards[own],
            values[own],
            mask[own],
            torch.tensor([0, end - start]),
            gamma=0.99,
            lam=0.95,
            bootstrap_B=bootstrap[row : row + 1],
        )
        torch.testing.assert_close(together[own], alone, rtol=1e-6, atol=1e-7)


@given(seeds, st.floats(0.1, 1))
def test_gae_with_lambda_1_is_the_return_less_the_value(seed: int, gamma: float) -> None:
    rewards, values, mask, cu_seqlens, _ = ragged(seed)
    advantages, targets = gae(
        rewards, values, mask, cu_seqlens, gamma=gamma, lam=1.0, bootstrap_B=torch.zeros(len(cu_seqlens) - 1)
    )
    returns = discounted_returns(rewards, mask, cu_seqlens, gamma=gamma)
    torch.testing.assert_close(targets, returns, rtol=1e-5, atol=1e-5)
    expected = torch.where(mask, returns.double() - values, 0).float()
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)


@given(seeds)
def test_reward_at_the_end_and_no_discount_is_credit_of_the_trajectory(seed: int) -> None:
    _, _, mask, cu_seqlens, generator = ragged(seed)
    rewards = torch.randn(len(cu_seqlens) - 1, generator=generator)
    returns = discounted_returns(at_last_token(rewards, mask, cu_seqlens), mask, cu_seqlens, gamma=1.0)
    for row, part in enumerate(returns.tensor_split(cu_seqlens[1:-1])):
        own = mask.tensor_split(cu_seqlens[1:-1])[row]
        assert torch.equal(part, torch.where(own, rewards[row], 0))


@given(seeds)
def test_turns_cover_exactly_the_scored_tokens(seed: int) -> None:
    _, _, mask, cu_seqlens, generator = ragged(seed)
    found = turns(mask, cu_seqlens)
    number = int(found.cu_turns_B1[-1])
    assert torch.equal(found.turn_T >= 0, mask)
    assert found.turn_T[mask].unique().tolist() == list(range(number))
    rewards = torch.randn(number, generator=generator)
    spread = turns_to_tokens(turn_returns(rewards, found.cu_turns_B1, gamma=0.0), found.turn_T)
    assert torch.equal(spread[mask], rewards[found.turn_T[mask]])


@given(seeds, st.integers(1, 4), st.floats(-1000, 1000))
def test_moments_of_ranks_add_up_to_those_of_the_batch(seed: int, ranks: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(23, generator=generator) + offset
    mask = torch.rand(23, generator=generator) > 0.3
    summed = Moments()
    for part, own in zip(values.chunk(ranks), mask.chunk(ranks), strict=True):
        summed = summed + moments(part, own)
    whole = moments(values, mask)
    assert summed.count == whole.count
    assert summed.mean == pytest.approx(whole.mean, rel=1e-12, abs=1e-12)
    assert summed.variance == pytest.approx(whole.variance, rel=1e-8, abs=1e-12)
    if whole.count > 1:
        assert whole.variance == pytest.approx(values[mask].double().var().item(), rel=1e-7, abs=1e-12)
    torch.testing.assert_close(whiten(values, mask, summed), whiten(values, mask, whole), rtol=1e-6, atol=1e-6)


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.floats(-1, 1)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_a_tracked_baseline_ignores_the_order_and_stays_within_seen_rewards(
    rewards: list[tuple[str, float]], random: Random
) -> None:
    before = {"": (0.5, 4.0), "a": (-1.0, 1.0)}
    after = track(before, sums_of(rewards), keep=0.9)
    shuffled = list(rewards)
    random.shuffle(shuffled)
    assert track(before, sums_of(shuffled), keep=0.9) == after
    assert after.keys() == {"", *(bucket for bucket, _ in rewards)}, "other buckets keep their values"
    for bucket in ("", "a", "b"):
        assert -1 <= value_of(before | after, bucket, value=0.0, weight=2.0) <= 1


@given(seeds)
def test_gspo_does_not_depend_on_the_ids_of_sequences(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 4, (12,), generator=generator)
    policy, behaviour, noise = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    advantages = noise[rows]
    clip = {"clip_low": 0.2, "clip_high": 0.3}
    one = gspo_loss(policy, behaviour, advantages, rows, **clip)
    other = gspo_loss(policy, behaviour, advantages, torch.tensor([7, 0, 30, 2])[rows], **clip)
    assert torch.equal(one.loss_M, other.loss_M)
    order = torch.randperm(12, generator=generator)
    mixed = gspo_loss(policy[order], behaviour[order], advantages[order], rows[order], **clip)
    torch.testing.assert_close(mixed.loss_M, one.loss_M[order])


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=20), st.floats(0.1, 0.9), st.floats(1.1, 10))
def test_importance_weights_stay_in_bounds(log_ratios: list[float], low: float, high: float) -> None:
    log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
    truncated, masked = truncated_weights(log_ratio, high=high), masked_weights(log_ratio, low=low, high=high)
    assert (truncated <= high).all()
    kept = masked != 0
    assert torch.equal(masked[kept], log_ratio.exp()[kept])
    assert ((masked[kept] >= low) & (masked[kept] <= high)).all()
    assert torch.equal(kept, (log_ratio.exp() >= low) & (log_ratio.exp() <= high))
