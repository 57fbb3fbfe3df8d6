"""Group Sequence Policy Optimization: one ratio per sequence.

Shape legend: M = scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.shared.algorithms.policy_loss import PolicyLoss, clipped, log_ratio
from penstock.shared.algorithms.sequences import sequence_sum

__all__ = ["gspo_loss"]


def gspo_loss(
    logprobs_M: Tensor,
    behaviour_logprobs_M: Tensor,
    advantages_M: Tensor,
    rows_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Clipped loss on ``s = exp(mean_t log(pi / pi_behaviour))``, one s per sequence (arXiv 2507.18071, eq. 5, 7).

    Token t has ``sg(s) · pi_t / sg(pi_t)`` (GSPO-token, eq. 14), whose value is s and whose gradient is
    ``s · grad log pi_t``: with the sequence mean as aggregation this is the gradient of ``s · A``, and advantages may
    differ from token to token.

    Args:
        rows_M: int64, number of the trajectory of each token; M must hold all scored tokens of a trajectory.
        Others as ``policy_loss.clipped_ratio_loss``.
    """
    log_ratio_M = log_ratio(logprobs_M.detach(), behaviour_logprobs_M)
    mean_M = sequence_sum(log_ratio_M, rows_M) / sequence_sum(torch.ones_like(log_ratio_M), rows_M)
    ratio_M = (mean_M + logprobs_M - logprobs_M.detach()).exp()
    return clipped(ratio_M, advantages_M, low=1 - clip_low, high=1 + clip_high)
