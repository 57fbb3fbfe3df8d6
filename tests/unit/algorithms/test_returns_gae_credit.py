"""Returns, GAE and credit against closed forms, and against a loop that does what the text of the papers says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.shared.algorithms.credit import at_last_token, to_tokens, turn_returns, turns, turns_to_tokens
from penstock.shared.algorithms.gae import gae
from penstock.shared.algorithms.returns import discounted_returns
from penstock.shared.algorithms.sequences import discounted_suffix_sums, sequence_of

# Three trajectories: the first has two turns, with observations before, between and after them; the second is scored
# whole; the third has no scored token.
CU_SEQLENS = torch.tensor([0, 8, 11, 13])
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0])


def by_loop(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float, bootstrap: Tensor
) -> tuple[Tensor, Tensor]:
    advantages, returns = torch.zeros(2, len(rewards), dtype=torch.float64)
    for row, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        following, advantage = float(bootstrap[row]), 0.0
        for t in reversed(range(start, end)):
            if mask[t]:
                delta = float(rewards[t]) + gamma * following - float(values[t])
                advantage = delta + gamma * lam * advantage
                following = float(values[t])
                advantages[t], returns[t] = advantage, advantage + following
    return advantages, returns


@pytest.fixture
def flat() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(2, len(MASK), generator=generator, dtype=torch.float64))  # type: ignore[return-value]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.7, 1.0)])
def test_gae_is_the_loop(flat: tuple[Tensor, Tensor], gamma: float, lam: float) -> None:
    rewards, values = flat
    bootstrap = torch.tensor([0.7, 0.0, -1.0])
    ours = gae(rewards, values, MASK, CU_SEQLENS, gamma=gamma, lam=lam, bootstrap_B=bootstrap)
    expected = by_loop(rewards, values, MASK, CU_SEQLENS, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-6, atol=1e-7)


def test_lambda_0_is_the_one_step_error_and_lambda_1_the_return_less_the_value(flat: tuple[Tensor, Tensor]) -> None:
    rewards, values = flat
    every, cu_seqlens, bootstrap = torch.ones(4), torch.tensor([0, 4]), torch.tensor([2.0])
    r, v = rewards[:4], values[:4]
    one_step, _ = gae(r, v, every, cu_seqlens, gamma=0.9, lam=0.0, bootstrap_B=bootstrap)
    torch.testing.assert_close(one_step.double(), r + 0.9 * torch.cat([v[1:], bootstrap]) - v, rtol=0, atol=1e-6)
    whole, targets = gae(r, v, every, cu_seqlens, gamma=0.9, lam=1.0, bootstrap_B=bootstrap)
    returns = discounted_returns(r, every, cu_seqlens, gamma=0.9) + 2.0 * 0.9 ** torch.tensor([4.0, 3.0, 2.0, 1.0])
    torch.testing.assert_close(whole.double(), returns.double() - v, rtol=0, atol=1e-6)
    torch.testing.assert_close(targets, returns, rtol=0, atol=1e-6)


def test_a_perfect_critic_leaves_no_advantage() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0])
    values = torch.tensor([0.81, 0.9, 1.0])
    advantages, returns = gae(
        rewards, values, torch.ones(3), torch.tensor([0, 3]), gamma=0.9, lam=0.95, bootstrap_B=torch.zeros(1)
    )
    torch.testing.assert_close(advantages, torch.zeros(3), rtol=0, atol=1e-6)
    torch.testing.assert_close(returns, values)


def test_no_gradient_flows_through_the_targets() -> None:
    values = torch.zeros(3, requires_grad=True)
    results = gae(
        torch.ones(3), values, torch.ones(3), torch.tensor([0, 3]), gamma=1.0, lam=0.9, bootstrap_B=torch.zeros(1)
    )
    assert not any(result.requires_grad for result in results)


def test_a_long_sequence_is_summed_like_a_short_one() -> None:
    """The sequence is longer than a power of two, and the sums of its neighbour must not leak into it."""
    values = torch.cat([torch.ones(1029), torch.full((3,), 1e6)])
    sequence = torch.cat([torch.zeros(1029), torch.ones(3)]).long()
    sums = discounted_suffix_sums(values, sequence, decay=0.99)
    steps = torch.arange(1029, 0, -1, dtype=torch.float64)
    torch.testing.assert_close(sums[:1029], (1 - 0.99**steps) / (1 - 0.99), rtol=1e-12, atol=0)
    assert sums[-1] == 1e6


def test_empty_inputs_give_empty_outputs() -> None:
    empty, cu_seqlens = torch.zeros(0), torch.zeros(1, dtype=torch.long)
    assert not len(discounted_returns(empty, empty, cu_seqlens, gamma=0.9))
    advantages, _ = gae(empty, empty, empty, cu_seqlens, gamma=1.0, lam=1.0, bootstrap_B=empty)
    assert not len(advantages)


def test_the_reward_lands_on_the_last_scored_token() -> None:
    rewards = at_last_token(torch.tensor([1.0, 2.0, 3.0]), MASK, CU_SEQLENS)
    assert rewards.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0]


def test_credit_of_the_trajectory() -> None:
    spread = to_tokens(torch.tensor([1.0, 2.0, 3.0]), MASK, CU_SEQLENS)
    assert spread.tolist() == [0, 1, 1, 0, 0, 1, 1, 0, 2, 2, 2, 0, 0]
    undiscounted = discounted_returns(
        at_last_token(torch.tensor([1.0, 2.0, 3.0]), MASK, CU_SEQLENS), MASK, CU_SEQLENS, gamma=1.0
    )
    assert undiscounted.tolist() == spread.tolist()


def test_credit_of_turns_discounts_turns_not_tokens() -> None:
    found = turns(MASK, CU_SEQLENS)
    assert found.turn_T.tolist() == [-1, 0, 0, -1, -1, 1, 1, -1, 2, 2, 2, -1, -1]
    assert found.cu_turns_B1.tolist() == [0, 2, 3, 3]
    returns = turn_returns(torch.tensor([1.0, 4.0, 8.0]), found.cu_turns_B1, gamma=0.5)
    assert returns.tolist() == [3.0, 4.0, 8.0]
    assert turns_to_tokens(returns, found.turn_T).tolist() == [0, 3, 3, 0, 0, 4, 4, 0, 8, 8, 8, 0, 0]


def test_neighbouring_trajectories_are_different_turns() -> None:
    found = turns(torch.ones(4), torch.tensor([0, 2, 4]))
    assert found.turn_T.tolist() == [0, 0, 1, 1]
    assert found.cu_turns_B1.tolist() == [0, 1, 2]


def test_sequences_of_length_0_keep_their_number() -> None:
    assert sequence_of(torch.tensor([0, 2, 2, 3])).tolist() == [0, 0, 2]
