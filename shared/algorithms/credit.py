"""Credit assignment: the reward is placed at the last token of a trajectory, at all its tokens, or at the tokens of a
turn.

A turn is a run of scored tokens; observations between two turns have mask 0.

Shape legend: B = trajectories, B1 = B + 1, T = tokens of all trajectories, concatenated; K = turns of all
trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.shared.algorithms.sequences import discounted_suffix_sums, is_last, sequence_of

__all__ = ["Turns", "at_last_token", "to_tokens", "turn_returns", "turns", "turns_to_tokens"]


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of a batch, numbered from 0: the turn of each token, and the range of turns of each trajectory.

    Attributes:
        turn_T: number of the turn of each token among all turns of the batch, from 0; -1 where the mask is 0.
        cu_turns_B1: int64 [B + 1], splits the K turns into trajectories.
    """

    turn_T: Tensor
    cu_turns_B1: Tensor


def at_last_token(rewards_B: Tensor, mask_T: Tensor, cu_seqlens_B1: Tensor) -> Tensor:
    """Return the whole reward of each trajectory at its last *scored* token, 0 elsewhere, [T].

    If a trajectory ends with an observation, its last scored token is the one before the observation. The reward of a
    trajectory without a scored token is lost.
    """
    scored_T = mask_T.bool()
    sequence_T = sequence_of(cu_seqlens_B1)
    places = scored_T.nonzero()[:, 0][is_last(sequence_T[scored_T])]
    rewards_T = rewards_B.new_zeros(len(mask_T))
    rewards_T[places] = rewards_B[sequence_T[places]]
    return rewards_T


def to_tokens(values_B: Tensor, mask_T: Tensor, cu_seqlens_B1: Tensor) -> Tensor:
    """Return the value of each trajectory at its scored tokens, 0 elsewhere, [T]."""
    return torch.where(mask_T.bool(), values_B[sequence_of(cu_seqlens_B1)], 0)


def turns(mask_T: Tensor, cu_seqlens_B1: Tensor) -> Turns:
    """Number the turns, which are runs of scored tokens."""
    scored_T, sequence_T = mask_T.bool(), sequence_of(cu_seqlens_B1)
    begins_T = scored_T.clone()
    begins_T[1:] &= ~scored_T[:-1] | (sequence_T[1:] != sequence_T[:-1])
    turn_T = torch.where(scored_T, begins_T.cumsum(0) - 1, -1)
    ends = torch.cat([begins_T.new_zeros(1, dtype=torch.int64), begins_T.cumsum(0)])
    return Turns(turn_T=turn_T, cu_turns_B1=ends[cu_seqlens_B1])


def turn_returns(rewards_K: Tensor, cu_turns_B1: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return of each turn, ``G_k = r_k + gamma · G_{k+1}`` within a trajectory, float32 [K].

    The discount counts turns, not tokens: a long answer is not discounted more than a short one.
    """
    return discounted_suffix_sums(rewards_K, sequence_of(cu_turns_B1), decay=gamma).float()


def turns_to_tokens(values_K: Tensor, turn_T: Tensor) -> Tensor:
    """Return the value of each turn at its scored tokens, 0 elsewhere, [T]."""
    if not len(values_K):
        return values_K.new_zeros(len(turn_T))
    return torch.where(turn_T >= 0, values_K[turn_T.clamp_min(0)], 0)
