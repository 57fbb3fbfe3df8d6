"""Alternatives to PPO's clip that keep the policy near the policy that sampled the data.

Shape legend: M = scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.shared.algorithms.policy_loss import PolicyLoss, log_ratio
from penstock.shared.algorithms.sequences import sequence_sum

__all__ = ["dppo_loss", "gmpo_loss", "sapo_loss"]


def sapo_loss(
    logprobs_M: Tensor, behaviour_logprobs_M: Tensor, advantages_M: Tensor, *, tau_positive: float, tau_negative: float
) -> PolicyLoss:
    """``-A · sigmoid(tau (r - 1)) · 4 / tau`` (SAPO, arXiv 2511.20347): a soft gate instead of the clip.

    At ratio 1 the gradient is that of ``-A log pi``; it decays as the ratio moves away from 1. The aggregation is the
    sequence mean.

    Args:
        tau_positive, tau_negative: sharpness of the gate for A > 0 and for A <= 0; the paper uses 1.0 and 1.05.
        Others as ``policy_loss.clipped_ratio_loss``.
    """
    ratio_M = log_ratio(logprobs_M, behaviour_logprobs_M).exp()
    tau_M = torch.full_like(ratio_M, tau_negative).masked_fill(advantages_M > 0, tau_positive)
    never_M = torch.zeros_like(ratio_M, dtype=torch.bool)
    loss_M = -advantages_M * torch.sigmoid(tau_M * (ratio_M - 1)) * 4 / tau_M
    return PolicyLoss(loss_M, ratio_M.detach(), never_M, never_M)


def gmpo_loss(
    logprobs_M: Tensor,
    behaviour_logprobs_M: Tensor,
    advantages_M: Tensor,
    rows_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """``-A · exp(mean_t clip(log r_t))``, the geometric mean of token ratios (GMPO, arXiv 2507.20673, eq. 4).

    The log-ratio is clipped to [-clip_low, clip_high] token by token, on the side determined by the sign of A. Each
    token has the loss of its sequence; the aggregation is the sequence mean.

    Args:
        advantages_M: equal for all tokens of a trajectory.
        rows_M: int64, number of the trajectory of each token; M must hold all scored tokens of a trajectory.
        clip_low, clip_high: bounds of the *log*-ratio; the paper uses 0.4 for both.
    """
    log_ratio_M = log_ratio(logprobs_M, behaviour_logprobs_M)
    clipped_M = log_ratio_M.clamp(-clip_low, clip_high)
    bounded_M = torch.where(advantages_M > 0, clipped_M.minimum(log_ratio_M), clipped_M.maximum(log_ratio_M))
    mean_M = sequence_sum(bounded_M, rows_M) / sequence_sum(torch.ones_like(bounded_M), rows_M)
    log_ratio_M = log_ratio_M.detach()
    return PolicyLoss(
        loss_M=-advantages_M * mean_M.exp(),
        ratio_M=log_ratio_M.exp(),
        clipped_low_M=(advantages_M < 0) & (log_ratio_M < -clip_low),
        clipped_high_M=(advantages_M > 0) & (log_ratio_M > clip_high),
    )


def dppo_loss(
    logprobs_M: Tensor,
    behaviour_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    divergence_low: float,
    divergence_high: float,
    max_weight: float,
) -> PolicyLoss:
    """``-sg(min(r, max_weight)) · A · log pi`` within a total-variation trust region (DPPO-Binary-TV, arXiv
    2602.04879).

    A token is removed from the loss once its *probability* has moved further than the bound in the direction of its
    advantage; before that, the ratio of a rare token may change a lot.

    Args:
        divergence_low, divergence_high: largest decrease of the probability for A <= 0, largest increase for A > 0.
        max_weight: bound of the ratio as a weight.
    """
    ratio_M = log_ratio(logprobs_M.detach(), behaviour_logprobs_M).exp()
    change_M = logprobs_M.detach().exp() - behaviour_logprobs_M.exp()
    fallen_M = (advantages_M <= 0) & (change_M < -divergence_low)
    risen_M = (advantages_M > 0) & (change_M > divergence_high)
    inside_M = ~(fallen_M | risen_M)
    return PolicyLoss(
        loss_M=-ratio_M.clamp_max(max_weight) * advantages_M * logprobs_M * inside_M,
        ratio_M=ratio_M,
        clipped_low_M=fallen_M,
        clipped_high_M=risen_M,
    )
