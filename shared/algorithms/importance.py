"""Bounded importance weights, without gradient, for samples from a policy other than the trained policy.

Used if the sampler's log-probs differ from the trainer's for the same weights, and in decoupled PPO.

Shape legend: M = scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.shared.algorithms.policy_loss import MAX_LOG_RATIO, PolicyLoss, clipped_ratio_loss, log_ratio, weighted
from penstock.shared.algorithms.sequences import sequence_sum

__all__ = ["decoupled_loss", "masked_weights", "sequence_log_ratio", "truncated_weights"]


def sequence_log_ratio(logprobs_M: Tensor, behaviour_logprobs_M: Tensor, rows_M: Tensor) -> Tensor:
    """Return ``Σ_t log(pi / pi_behaviour)`` over the whole trajectory of each token, clamped to [-20, 20], [M].

    This is the log-ratio of whole sequences: the ratio is unbiased, but its variance grows with the length.

    Args:
        rows_M: int64, number of the trajectory of each token; M must hold all scored tokens of a trajectory.
    """
    return sequence_sum(logprobs_M - behaviour_logprobs_M, rows_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncated_weights(log_ratio_M: Tensor, *, high: float) -> Tensor:
    """``min(ratio, high)``: truncated importance sampling, TIS (Ionides, 2008).

    Args:
        log_ratio_M: from ``policy_loss.log_ratio`` (tokens) or ``sequence_log_ratio``.
    """
    return log_ratio_M.detach().exp().clamp_max(high)


def masked_weights(log_ratio_M: Tensor, *, low: float, high: float) -> Tensor:
    """Return the ratio if it is in [low, high], else 0: masked importance sampling, IcePop (arXiv 2510.18855).

    Args:
        log_ratio_M: from ``policy_loss.log_ratio`` (tokens) or ``sequence_log_ratio``.
    """
    ratio_M = log_ratio_M.detach().exp()
    return torch.where((ratio_M >= low) & (ratio_M <= high), ratio_M, 0)


def decoupled_loss(
    logprobs_M: Tensor,
    proximal_logprobs_M: Tensor,
    behaviour_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    high: float,
) -> PolicyLoss:
    """Decoupled PPO (arXiv 2110.00641, eq. 3): clip around the proximal policy, correct for the behaviour policy.

    ``min(pi_prox / pi_behaviour, high) · max(-A r, -A clip(r))`` with ``r = pi / pi_prox``: corrects old data without
    tying the trust region to the policy that sampled it.

    Args:
        proximal_logprobs_M: log-probs of the policy that the update must stay near, usually the policy before the
            update.
        high: bound of the importance weight.
        Others as ``policy_loss.clipped_ratio_loss``.
    """
    loss = clipped_ratio_loss(logprobs_M, proximal_logprobs_M, advantages_M, clip_low=clip_low, clip_high=clip_high)
    return weighted(loss, truncated_weights(log_ratio(proximal_logprobs_M, behaviour_logprobs_M), high=high))
