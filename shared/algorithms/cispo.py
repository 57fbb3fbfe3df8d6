"""Clipped importance-sampling weights: the weight is bounded, and every token keeps its gradient.

Shape legend: M = scored tokens.
"""

from __future__ import annotations

from torch import Tensor

from penstock.shared.algorithms.policy_loss import PolicyLoss, log_ratio

__all__ = ["cispo_loss"]


def cispo_loss(
    logprobs_M: Tensor, behaviour_logprobs_M: Tensor, advantages_M: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) · A · log pi`` (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    Args:
        clip_low: 1 means no lower bound.
        Others as ``policy_loss.clipped_ratio_loss``.
    """
    ratio_M = log_ratio(logprobs_M.detach(), behaviour_logprobs_M).exp()
    low, high = 1 - clip_low, 1 + clip_high
    return PolicyLoss(
        loss_M=-ratio_M.clamp(low, high) * advantages_M * logprobs_M,
        ratio_M=ratio_M,
        clipped_low_M=ratio_M < low,
        clipped_high_M=ratio_M > high,
    )
