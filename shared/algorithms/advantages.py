"""Advantages of whole trajectories, computed over the complete batch.

Shape legend: B = trajectories of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["grpo_advantages"]

STD_EPSILON = 1e-6


def grpo_advantages(rewards_B: Tensor, groups_B: Tensor, valid_B: Tensor, *, scale_by_std: bool) -> Tensor:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, §4.1.2).

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
    if not len(rewards_B):
        return torch.zeros(0)
    num_groups = int(groups_B.max()) + 1
    valid = valid_B.double()
    rewards = torch.where(valid_B, rewards_B, 0).double()
    count = _sum_by_group(valid, groups_B, num_groups)
    mean = _sum_by_group(rewards, groups_B, num_groups) / count.clamp_min(1)
    centred_B = (rewards - mean[groups_B]) * valid
    if scale_by_std:
        variance = _sum_by_group(centred_B.square(), groups_B, num_groups) / (count - 1).clamp_min(1)
        centred_B = centred_B / (variance.sqrt()[groups_B] + STD_EPSILON)
    return centred_B.float()


def _sum_by_group(values_B: Tensor, groups_B: Tensor, num_groups: int) -> Tensor:
    return torch.zeros(num_groups, dtype=values_B.dtype, device=values_B.device).index_add_(0, groups_B, values_B)
