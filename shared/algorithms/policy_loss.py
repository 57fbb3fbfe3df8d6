"""Policy-gradient losses per token; aggregation is a separate step.

``behaviour_logprobs_M`` is always the denominator of the ratio. It has the log-probs that the sampler reported, or
log-probs that the trainer recomputed; module ``importance`` corrects the difference between the two.

Shape legend: M = scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "PolicyLoss",
    "clipped",
    "clipped_ratio_loss",
    "dual_clipped_ratio_loss",
    "log_ratio",
    "policy_gradient_loss",
    "weighted",
]

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios; its exponential is still finite in float32 after multiplication with any realistic advantage."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses of M tokens, and which of them were clipped.

    Attributes:
        loss_M: differentiable in the log-probs.
        ratio_M: pi / pi_behaviour of the token (of its whole sequence, in losses with sequence ratios), detached.
        clipped_low_M: bool, the lower bound was active (it removed the gradient, or raised the weight).
        clipped_high_M: bool, the upper bound was active (it removed the gradient, or lowered the weight).
    """

    loss_M: Tensor
    ratio_M: Tensor
    clipped_low_M: Tensor
    clipped_high_M: Tensor


def log_ratio(logprobs_M: Tensor, behaviour_logprobs_M: Tensor) -> Tensor:
    """``log(pi / pi_behaviour)``, limited to [-20, 20] so that its exponential is finite."""
    return (logprobs_M - behaviour_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_gradient_loss(logprobs_M: Tensor, behaviour_logprobs_M: Tensor, advantages_M: Tensor) -> PolicyLoss:
    """``-A log pi`` (REINFORCE, Williams, 1992): the policy-gradient loss for on-policy data, without ratio and clip.

    Args:
        behaviour_logprobs_M: only used to report the ratio.
    """
    never_M = torch.zeros_like(advantages_M, dtype=torch.bool)
    ratio_M = log_ratio(logprobs_M.detach(), behaviour_logprobs_M).exp()
    return PolicyLoss(-advantages_M * logprobs_M, ratio_M, never_M, never_M)


def clipped_ratio_loss(
    logprobs_M: Tensor, behaviour_logprobs_M: Tensor, advantages_M: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` (PPO, arXiv 1707.06347, eq. 7; as a loss).

    Unequal bounds are "clip-higher" (DAPO, arXiv 2503.14476, §3.1). At ratio 1 the gradient is that of ``-A log pi``.

    Args:
        logprobs_M: log-probs by the policy being trained; they carry the gradient.
        behaviour_logprobs_M: log-probs by the policy that sampled the tokens.
        advantages_M: advantage of the trajectory each token belongs to.
    """
    ratio_M = log_ratio(logprobs_M, behaviour_logprobs_M).exp()
    return clipped(ratio_M, advantages_M, low=1 - clip_low, high=1 + clip_high)


def clipped(ratio_M: Tensor, advantages_M: Tensor, *, low: float, high: float) -> PolicyLoss:
    """``max(-A r, -A clip(r, low, high))`` for advantages A and ratios r; a ratio may be that of a token or of a
    sequence."""
    loss_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * ratio_M.clamp(low, high))
    ratio_M = ratio_M.detach()
    return PolicyLoss(
        loss_M=loss_M,
        ratio_M=ratio_M,
        clipped_low_M=(advantages_M < 0) & (ratio_M < low),
        clipped_high_M=(advantages_M > 0) & (ratio_M > high),
    )


def dual_clipped_ratio_loss(
    logprobs_M: Tensor,
    behaviour_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> PolicyLoss:
    """``clipped_ratio_loss``, limited to ``dual_clip · |A|`` for A < 0 (arXiv 1912.09729).

    Bounds the loss of a bad token whose probability has grown much since it was sampled.

    Args:
        dual_clip: bound of the ratio where A < 0, above 1 + clip_high.
        Others as ``clipped_ratio_loss``.
    """
    loss = clipped_ratio_loss(logprobs_M, behaviour_logprobs_M, advantages_M, clip_low=clip_low, clip_high=clip_high)
    beyond_M = (advantages_M < 0) & (loss.ratio_M > dual_clip)
    return replace(
        loss,
        loss_M=torch.where(beyond_M, -advantages_M * dual_clip, loss.loss_M),
        clipped_high_M=loss.clipped_high_M | beyond_M,
    )


def weighted(loss: PolicyLoss, weights_M: Tensor) -> PolicyLoss:
    """Return the loss of each token times its importance weight, through which no gradient flows.

    A token of weight 0 adds nothing to the sum, but denominators still count it.
    """
    return replace(loss, loss_M=loss.loss_M * weights_M.detach())
