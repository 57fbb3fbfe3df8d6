"""Advantages of whole trajectories, computed over the complete batch.

Shape legend: B = trajectories of the batch, G = groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.shared.algorithms.statistics import Moments, whiten

__all__ = ["grpo_advantages", "reinforce_pp_baseline_advantages", "remax_advantages", "rloo_advantages"]

STD_EPSILON = 1e-6


def grpo_advantages(rewards_B: Tensor, groups_B: Tensor, valid_B: Tensor, *, scale_by_std: bool) -> Tensor:
    """Return group-relative advantages (DeepSeekMath, arXiv 2402.03300, §4.1.2).

    ``A = (r - mean) / (std + 1e-6)`` with mean and unbiased standard deviation of the valid trajectories of the same
    group; without ``scale_by_std`` it is ``r - mean`` (Dr. GRPO, arXiv 2503.20783).

    The statistics are taken in float64, so that a group of equal rewards gets advantages of exactly 0.

    Args:
        rewards_B: float [B].
        groups_B: int64 [B], number of the group a trajectory belongs to, from 0.
        valid_B: bool [B]; a trajectory that is not valid changes no statistic and gets 0.

    Returns:
        float32 [B]. A group with a single valid trajectory has no baseline and gets 0.
    """
    centred_B, count_B = _centred_by_group(rewards_B, groups_B, valid_B)
    if scale_by_std and len(rewards_B):
        variance_B = _sum_by_group(centred_B.square(), groups_B)[groups_B] / (count_B - 1).clamp_min(1)
        centred_B = centred_B / (variance_B.sqrt() + STD_EPSILON)
    return centred_B.float()


def rloo_advantages(rewards_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> Tensor:
    """Return the reward minus the mean of the *other* trajectories of the group (RLOO, arXiv 2402.14740).

    ``A_i = r_i - Σ_{j≠i} r_j / (n - 1) = n / (n - 1) · (r_i - mean)`` for the n valid trajectories of a group.

    Args, returns: as ``grpo_advantages``.
    """
    centred_B, count_B = _centred_by_group(rewards_B, groups_B, valid_B)
    return (centred_B * (count_B / (count_B - 1).clamp_min(1))).float()


def remax_advantages(rewards_B: Tensor, baselines_B: Tensor, valid_B: Tensor) -> Tensor:
    """``A = r - b`` where b is the reward of the greedy completion of the same prompt (ReMax, arXiv 2310.10505).

    Args:
        rewards_B: float [B].
        baselines_B: float [B], reward of the greedy completion for the prompt of each trajectory.
        valid_B: bool [B]; a trajectory that is not valid gets 0.

    Returns:
        float32 [B].
    """
    return torch.where(valid_B, rewards_B.double() - baselines_B.double(), 0).float()


def reinforce_pp_baseline_advantages(rewards_B: Tensor, groups_B: Tensor, valid_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Subtract the mean of the group, then whiten over the batch (REINFORCE++ with baseline, arXiv 2501.03262).

    With ``a = r - mean_group`` the advantage is ``A = (a - mean) / sqrt(var + 1e-8)``. Mean and variance are taken over
    all scored tokens of the batch, where each token has the ``a`` of its trajectory.

    Args:
        lengths_B: scored tokens of each trajectory.
        Others as ``grpo_advantages``.

    Returns:
        float32 [B].
    """
    centred_B, _ = _centred_by_group(rewards_B, groups_B, valid_B)
    weights_B = torch.where(valid_B, lengths_B, 0).double()
    over = Moments(
        float(weights_B.sum()),
        float((weights_B * centred_B).sum()),
        float((weights_B * centred_B.square()).sum()),
    )
    return whiten(centred_B, valid_B, over)


def _centred_by_group(rewards_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return each trajectory's reward minus the mean of its group (0 where not valid), and the number of valid
    trajectories in its group, both float64 [B]."""
    if not len(rewards_B):
        empty = torch.zeros(0, dtype=torch.float64)
        return empty, empty
    count_B = _sum_by_group(valid_B.double(), groups_B)[groups_B]
    rewards_B = torch.where(valid_B, rewards_B, 0).double()
    mean_B = _sum_by_group(rewards_B, groups_B)[groups_B] / count_B.clamp_min(1)
    return torch.where(valid_B, rewards_B - mean_B, 0), count_B


def _sum_by_group(values_B: Tensor, groups_B: Tensor) -> Tensor:
    return values_B.new_zeros(int(groups_B.max()) + 1).index_add_(0, groups_B, values_B)
