"""Discounted returns of each token.

Shape legend: B = trajectories, B1 = B + 1, T = tokens of all trajectories, concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.shared.algorithms.sequences import discounted_suffix_sums, sequence_of

__all__ = ["discounted_returns"]


def discounted_returns(rewards_T: Tensor, mask_T: Tensor, cu_seqlens_B1: Tensor, *, gamma: float) -> Tensor:
    """``G_t = r_t + gamma · G_{t+1}`` over the scored tokens of each trajectory (Sutton & Barto, 2018, eq. 3.9).

    Tokens of observations (mask 0) are not steps: they have no discount and their rewards are ignored.
    ``credit.at_last_token`` and ``credit.turns_to_tokens`` place rewards at scored tokens.

    Args:
        rewards_T: float [T], reward of each token.
        mask_T: bool or int [T], not 0 for tokens of the policy.
        cu_seqlens_B1: int64 [B + 1], splits T into trajectories.
        gamma: discount of one scored token.

    Returns:
        float32 [T], 0 where the mask is 0.
    """
    scored_T = mask_T.bool()
    returns_N = discounted_suffix_sums(rewards_T[scored_T], sequence_of(cu_seqlens_B1)[scored_T], decay=gamma)
    returns_T = torch.zeros(len(rewards_T), device=rewards_T.device, dtype=torch.float32)
    returns_T[scored_T] = returns_N.float()
    return returns_T
