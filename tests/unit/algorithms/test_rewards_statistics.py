"""Shaping of rewards, whitening, and baselines that need no group."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from penstock.shared.algorithms.advantages import (
    grpo_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from penstock.shared.algorithms.baseline import sums_of, track, value_of
from penstock.shared.algorithms.overlong import overlong_filter, soft_overlong_punishment
from penstock.shared.algorithms.rewards import normalise_rewards, penalised_rewards, scale_and_clip
from penstock.shared.algorithms.statistics import Moments, moments, whiten


def test_soft_overlong_punishment_is_equation_13() -> None:
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 30000])
    punished = soft_overlong_punishment(lengths, max_length=20480, buffer=4096)
    assert punished.tolist() == pytest.approx([0, 0, -1 / 4096, -0.5, -1, -1])


def test_overlong_filter_leaves_the_truncated_out() -> None:
    assert overlong_filter(torch.tensor([True, False])).tolist() == [False, True]


def test_scale_and_clip() -> None:
    rewards = torch.tensor([-4.0, 0.5, 4.0])
    assert scale_and_clip(rewards, scale=2.0, clip=(-1.0, 3.0)).tolist() == [-1.0, 1.0, 3.0]
    assert scale_and_clip(rewards, scale=0.5, clip=None).tolist() == [-2.0, 0.25, 2.0]


def test_running_normalisation_sees_all_rewards_so_far() -> None:
    first, second = torch.tensor([0.0, 4.0, 8.0]), torch.tensor([12.0, 1.0])
    seen = Moments() + moments(first, torch.ones(3)) + moments(second, torch.ones(2))
    values = np.array([0.0, 4, 8, 12, 1])
    expected = (np.array([12.0, 1.0]) - values.mean()) / values.std(ddof=1)
    assert normalise_rewards(second, seen).tolist() == pytest.approx(expected, rel=1e-6)


def test_one_reward_has_no_deviation() -> None:
    assert normalise_rewards(torch.tensor([3.0]), moments(torch.tensor([3.0]), torch.ones(1))).tolist() == [0.0]
    assert (Moments().mean, Moments().variance) == (0.0, 0.0)


def test_kl_is_subtracted_from_scored_tokens_only() -> None:
    rewards = penalised_rewards(
        torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0.5, math.nan, -2.0]), torch.tensor([1, 0, 1]), coef=0.1
    )
    assert rewards.tolist() == pytest.approx([-0.05, 0.0, 1.2])


def test_whitening_has_mean_0_and_unbiased_deviation_1() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, math.nan])
    mask = torch.tensor([1, 1, 1, 0])
    white = whiten(values, mask, moments(values, mask))
    assert white[:3].mean().item() == pytest.approx(0, abs=1e-6)
    assert white[:3].std().item() == pytest.approx(1, abs=1e-6)
    assert white[3] == 0


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 7.0, 3.0])
    groups = torch.tensor([0, 0, 0, 1, 2])
    valid = torch.tensor([True, True, True, True, False])
    assert rloo_advantages(rewards, groups, valid).tolist() == pytest.approx([-1.5, -3.0, 4.5, 0.0, 0.0])


def test_remax_subtracts_the_greedy_reward() -> None:
    advantages = remax_advantages(
        torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 0.5, math.nan]), torch.tensor([True, True, False])
    )
    assert advantages.tolist() == [0.5, -0.5, 0.0]


def test_reinforce_pp_baseline_weighs_trajectories_by_their_tokens() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 2.0, 0.0]), torch.tensor([0, 0, 1, 1])
    lengths = torch.tensor([3, 1, 2, 4])
    ours = reinforce_pp_baseline_advantages(rewards, groups, torch.ones(4) > 0, lengths)
    tokens = np.repeat([0.5, -0.5, 1.0, -1.0], [3, 1, 2, 4])
    expected = (np.array([0.5, -0.5, 1.0, -1.0]) - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8)
    assert ours.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("number", [0, 1])
def test_advantages_of_small_batches(number: int) -> None:
    rewards, groups, valid = torch.ones(number), torch.zeros(number, dtype=torch.long), torch.ones(number) > 0
    assert grpo_advantages(rewards, groups, valid, scale_by_std=True).tolist() == [0.0] * number
    assert rloo_advantages(rewards, groups, valid).tolist() == [0.0] * number
    assert reinforce_pp_baseline_advantages(rewards, groups, valid, torch.ones(number)).tolist() == [0.0] * number


def test_a_tracked_baseline_does_not_see_the_batch_it_judges() -> None:
    before = {"": (1.0, 2.0)}
    prior = {"value": 0.5, "weight": 4.0}
    assert value_of(before, "", **prior) == pytest.approx((1.0 + 4 * 0.5) / 6)
    assert value_of(before, "code", **prior) == pytest.approx(0.5), "an unseen kind has the value of all"
    after = track(before, sums_of([("code", 1.0), ("code", 0.0), ("", 1.0)]), keep=0.5)
    assert after == {"code": (1.0, 2.0), "": (2.5, 4.0)}
    whole = (2.5 + 4 * 0.5) / 8
    assert value_of(before | after, "code", **prior) == pytest.approx((1.0 + 4 * whole) / 6)


def test_a_tracked_baseline_forgets() -> None:
    tracked: dict[str, tuple[float, float]] = {}
    for reward in [-1.0] * 40 + [1.0] * 40:
        tracked |= track(tracked, sums_of([("", reward)] * 8), keep=0.8)
    assert value_of(tracked, "", value=0.0, weight=1e-6) == pytest.approx(1.0, abs=1e-3)
    assert tracked[""][1] == pytest.approx(8 / (1 - 0.8), rel=1e-3)
