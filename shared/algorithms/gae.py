"""Generalized advantage estimation.

Shape legend: B = trajectories, B1 = B + 1, T = tokens of all trajectories, concatenated; N = scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.shared.algorithms.sequences import discounted_suffix_sums, is_last, sequence_of

__all__ = ["gae"]


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens_B1: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return advantages and value targets (arXiv 1506.02438, eq. 16).

    ``δ_t = r_t + gamma · V_{t+1} - V_t``, ``A_t = δ_t + gamma · lam · A_{t+1}``, ``R_t = A_t + V_t``, where t counts
    the *scored* tokens of a trajectory: for the last token of a turn, ``V_{t+1}`` is the value at the first token of
    the next turn, after the observation. Advantages are not normalized here; see ``statistics.whiten``.

    Args:
        rewards_T: float [T]; rewards of tokens that are not scored are ignored.
        values_T: float [T], V of the state before each token; only scored tokens are read.
        mask_T: bool or int [T], not 0 for tokens of the policy.
        cu_seqlens_B1: int64 [B + 1], splits T into trajectories.
        gamma: discount of one scored token.
        lam: 0 gives the one-step error δ, 1 gives the return minus the value.
        bootstrap_B: float [B], V of the state after the last token for truncated trajectories, 0 for terminated ones.

    Returns:
        advantages and returns, float32 [T] without gradient, 0 where the mask is 0.
    """
    scored_T = mask_T.bool()
    sequence_N = sequence_of(cu_seqlens_B1)[scored_T]
    values_N = values_T.detach()[scored_T].double()
    following_N = torch.where(is_last(sequence_N), bootstrap_B.double()[sequence_N], values_N.roll(-1))
    deltas_N = rewards_T[scored_T].double() + gamma * following_N - values_N
    advantages_N = discounted_suffix_sums(deltas_N, sequence_N, decay=gamma * lam)
    advantages_T, returns_T = torch.zeros(2, len(rewards_T), device=rewards_T.device, dtype=torch.float32)
    advantages_T[scored_T] = advantages_N.float()
    returns_T[scored_T] = (advantages_N + values_N).float()
    return advantages_T, returns_T
