"""Laws that hold for every batch: of advantages, losses, aggregation and KL estimators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.algorithms.advantages import grpo_advantages
from penstock.shared.algorithms.aggregation import aggregate
from penstock.shared.algorithms.kl import k1, k2, k3, kl_estimate
from penstock.shared.algorithms.policy_loss import clipped_ratio_loss

rewards_lists = st.lists(st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=9), min_size=1, max_size=5)


def advantages(groups: list[list[float]], *, scale_by_std: bool, valid: torch.Tensor | None = None) -> torch.Tensor:
    rewards = torch.tensor([r for group in groups for r in group])
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else valid
    return grpo_advantages(rewards, index, valid, scale_by_std=scale_by_std)


@given(rewards_lists, st.booleans())
def test_advantages_of_a_group_sum_to_zero(groups: list[list[float]], scale_by_std: bool) -> None:
    parts = advantages(groups, scale_by_std=scale_by_std).split([len(g) for g in groups])
    assert all(abs(part.sum().item()) < 1e-4 for part in parts)


@given(rewards_lists, st.booleans(), st.integers(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(
    groups: list[list[float]], scale_by_std: bool, shift: int
) -> None:
    shifted = [[r + shift for r in group] for group in groups]
    torch.testing.assert_close(
        advantages(groups, scale_by_std=scale_by_std), advantages(shifted, scale_by_std=scale_by_std)
    )


@given(rewards_lists)
def test_groups_do_not_affect_each_other(groups: list[list[float]]) -> None:
    together = advantages(groups, scale_by_std=True)
    apart = torch.cat([advantages([group], scale_by_std=True) for group in groups])
    assert torch.equal(together, apart)


@given(rewards_lists)
def test_scaled_advantages_match_numpy(groups: list[list[float]]) -> None:
    expected = [
        (r - np.mean(group)) / (np.std(group, ddof=1) + 1e-6) for group in groups for r in group
    ]  # fmt: skip
    np.testing.assert_allclose(advantages(groups, scale_by_std=True).numpy(), expected, atol=1e-4)


@given(st.floats(-10, 10, width=32), st.integers(2, 12))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert not advantages([[reward] * size], scale_by_std=True).any()


@given(rewards_lists, st.data())
def test_failed_trajectories_change_no_statistic(groups: list[list[float]], data: st.DataObject) -> None:
    total = sum(len(g) for g in groups)
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    with_failed = advantages(groups, scale_by_std=True, valid=valid)
    assert not with_failed[~valid].any()
    rewards = torch.tensor([r for group in groups for r in group])
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    if valid.any():
        without = grpo_advantages(rewards[valid], index[valid], valid[valid], scale_by_std=True)
        assert torch.equal(with_failed[valid], without)


def test_a_failed_reward_that_is_not_a_number_is_ignored() -> None:
    rewards = torch.tensor([1.0, 0.0, math.nan])
    valid = torch.tensor([True, True, False])
    result = grpo_advantages(rewards, torch.zeros(3, dtype=torch.long), valid, scale_by_std=False)
    assert result.tolist() == [0.5, -0.5, 0.0]


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-3, 3, allow_subnormal=False)), min_size=1, max_size=20))
def test_at_ratio_one_the_gradient_is_the_policy_gradient(tokens: list[tuple[float, float]]) -> None:
    logprobs = torch.tensor([t[0] for t in tokens], dtype=torch.float64, requires_grad=True)
    advantages_M = torch.tensor([t[1] for t in tokens], dtype=torch.float64)
    loss = clipped_ratio_loss(logprobs, logprobs.detach(), advantages_M, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), logprobs)
    # Exact: the bound only lets the smallest floats lose a bit, as each branch of the maximum gets half the gradient.
    torch.testing.assert_close(gradient, -advantages_M, rtol=0, atol=1e-300)


@given(
    st.floats(-3, 3), st.floats(-5, 5), st.floats(0.01, 0.9), st.floats(0.01, 2)
)  # fmt: skip
def test_the_clip_is_pessimistic_and_stops_the_gradient(
    log_r: float, advantage: float, clip_low: float, clip_high: float
) -> None:
    logprobs = torch.tensor([log_r], dtype=torch.float64, requires_grad=True)
    loss = clipped_ratio_loss(
        logprobs, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64),
        clip_low=clip_low, clip_high=clip_high,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss.loss_M.sum(), logprobs)
    clipped = bool(loss.clipped_low_M | loss.clipped_high_M)
    assert loss.loss_M.item() >= -advantage * math.exp(log_r) - 1e-9
    expected = 0.0 if clipped else -advantage * math.exp(log_r)
    assert gradient.item() == pytest.approx(expected, abs=1e-9)


def test_gradcheck_of_the_whole_loss() -> None:
    generator = torch.Generator().manual_seed(3)
    behaviour = -torch.rand(12, generator=generator, dtype=torch.float64)
    reference = behaviour + 0.2 * torch.randn(12, generator=generator, dtype=torch.float64)
    advantages_M = torch.randn(12, generator=generator, dtype=torch.float64)
    lengths_M = torch.tensor([4.0] * 4 + [8.0] * 8, dtype=torch.float64)
    start = (behaviour + 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)).requires_grad_()

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        policy = clipped_ratio_loss(logprobs, behaviour, advantages_M, clip_low=0.2, clip_high=0.28).loss_M
        total = policy + 0.1 * k3(logprobs, reference) + 0.1 * k2(logprobs, reference) + 0.1 * k1(logprobs, reference)
        return aggregate("sequence_mean", total, lengths_M, num_tokens=12, num_sequences=2, horizon=8)

    assert torch.autograd.gradcheck(loss, (start,))


@given(st.sampled_from(["token_mean", "sequence_mean", "constant"]), st.integers(0, 2**32), st.integers(1, 5))
def test_microbatches_add_up_to_the_minibatch(mode: str, seed: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (6,), generator=generator)
    lengths_M = torch.repeat_interleave(lengths, lengths).double()
    values = torch.randn(len(lengths_M), generator=generator, dtype=torch.float64)

    def of(v: torch.Tensor, n: torch.Tensor) -> float:
        return aggregate(mode, v, n, num_tokens=len(values), num_sequences=6, horizon=16).item()  # type: ignore[arg-type]

    cut = [of(v, n) for v, n in zip(values.chunk(parts), lengths_M.chunk(parts), strict=True)]
    assert sum(cut) == pytest.approx(of(values, lengths_M), abs=1e-12)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20))
def test_kl_estimators_are_zero_for_equal_policies_and_bounded(pairs: list[tuple[float, float]]) -> None:
    p, q = torch.tensor(pairs, dtype=torch.float64).T
    for estimator in ("k1", "k2", "k3"):
        assert not kl_estimate(estimator, p, p).any()
    assert (k3(p, q) >= -1e-12).all()
    assert (k3(p, q) <= 10).all()
    assert (k2(p, q) >= 0).all()


def test_estimators_agree_with_the_exact_values_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = torch.log_softmax(torch.randn(8, generator=generator), 0)
    log_q = torch.log_softmax(log_p + 0.3 * torch.randn(8, generator=generator), 0)
    tokens = torch.multinomial(log_p.exp(), 200_000, replacement=True, generator=generator)
    exact_kl = (log_p.exp() * (log_p - log_q)).sum().item()
    for estimator in ("k1", "k3"):
        estimate = kl_estimate(estimator, log_p[tokens], log_q[tokens]).mean().item()
        assert estimate == pytest.approx(exact_kl, abs=4e-3)
