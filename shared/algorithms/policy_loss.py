"""Policy-gradient losses for each token; aggregation is a separate step.

Shape legend: M = scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PolicyLoss", "clipped_ratio_loss", "log_ratio"]

MAX_LOG_RATIO = 20.0
"""exp of this is still finite in float32 after multiplication with any sensible advantage."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses of M tokens and what the clip did to them.

    Attributes:
        loss_M: differentiable in the log-probs.
        ratio_M: pi / pi_behaviour, detached.
        clipped_low_M: bool, the lower bound cut the gradient (A < 0 and the ratio is below it).
        clipped_high_M: bool, the upper bound cut the gradient (A > 0 and the ratio is above it).
    """

    loss_M: Tensor
    ratio_M: Tensor
    clipped_low_M: Tensor
    clipped_high_M: Tensor


def log_ratio(logprobs_M: Tensor, behaviour_logprobs_M: Tensor) -> Tensor:
    """``log(pi / pi_behaviour)``, limited to [-20, 20] so that its exponential is finite."""
    return (logprobs_M - behaviour_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_ratio_loss(
    logprobs_M: Tensor, behaviour_logprobs_M: Tensor, advantages_M: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` (PPO, arXiv 1707.06347, eq. 7; as a loss).

    Different bounds are "clip-higher" (DAPO, arXiv 2503.14476, §3.1). At ratio 1 the gradient is that of ``-A log pi``.

    Args:
        logprobs_M: of the policy being trained; carries the gradient.
        behaviour_logprobs_M: of the policy that sampled the tokens.
        advantages_M: of the trajectory each token belongs to.
    """
    ratio_M = log_ratio(logprobs_M, behaviour_logprobs_M).exp()
    low, high = 1 - clip_low, 1 + clip_high
    loss_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * ratio_M.clamp(low, high))
    ratio_M = ratio_M.detach()
    return PolicyLoss(
        loss_M=loss_M,
        ratio_M=ratio_M,
        clipped_low_M=(advantages_M < 0) & (ratio_M < low),
        clipped_high_M=(advantages_M > 0) & (ratio_M > high),
    )
