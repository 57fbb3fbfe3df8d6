"""A baseline for data without groups: each prompt, or source of prompts, comes once, so its value is tracked over time.

Single-stream policy optimization (arXiv 2509.13232, §3.2): subtract the tracked value, then whiten over the batch.

Shape legend: B = trajectories of the batch, K = keys (prompts or sources).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ValueTracker", "new_tracker", "track"]


@dataclass(frozen=True, slots=True)
class ValueTracker:
    """Rewards seen for each key, older ones counting less.

    Attributes:
        total_K: float64, weighted sum of rewards.
        weight_K: float64, sum of weights: the number of rewards that the value rests on.
    """

    total_K: Tensor
    weight_K: Tensor

    @property
    def values(self) -> Tensor:
        """Weighted mean reward of each key, float64 [K]."""
        return self.total_K / self.weight_K


def new_tracker(num_keys: int, *, value: float, weight: float) -> ValueTracker:
    """Every key starts as if it had given ``weight`` rewards (> 0) of ``value``."""
    weight_K = torch.full((num_keys,), weight, dtype=torch.float64)
    return ValueTracker(total_K=weight_K * value, weight_K=weight_K)


def track(
    tracker: ValueTracker, rewards_B: Tensor, keys_B: Tensor, valid_B: Tensor, *, keep: float
) -> tuple[Tensor, ValueTracker]:
    """Baselines for a batch, and the tracker after it.

    The baseline is the value *before* the batch: it does not depend on the actions that it judges, so the policy
    gradient stays unbiased. Then, for each key that occurs, ``weight ← keep · weight + n`` and
    ``total ← keep · total + Σ r``: the order inside a batch does not matter.

    Args:
        rewards_B: float [B].
        keys_B: int64 [B].
        valid_B: bool [B]; a trajectory that is not valid teaches nothing.
        keep: in (0, 1], how much of the past remains; 1 is the mean of everything.

    Returns:
        baselines float64 [B], and a new tracker.
    """
    count_K = torch.zeros_like(tracker.weight_K).index_add_(0, keys_B, valid_B.double())
    total_K = torch.zeros_like(tracker.total_K).index_add_(0, keys_B, torch.where(valid_B, rewards_B, 0).double())
    keep_K = torch.ones_like(count_K).masked_fill(count_K > 0, keep)
    after = ValueTracker(
        total_K=keep_K * tracker.total_K + total_K,
        weight_K=keep_K * tracker.weight_K + count_K,
    )
    return tracker.values[keys_B], after
