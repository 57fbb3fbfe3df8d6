"""``KL(pi || pi_ref)``: exact, and estimated from tokens sampled by pi (Schulman, "Approximating KL divergence", 2020).

Uses (arXiv 2506.09477): as a *reward* only k1 gives the gradient of the KL, as a *loss* only k2 and the exact sum do;
k3 as a loss is the usual choice of GRPO and has the gradient of KL(pi_ref || pi).

Shape legend: M = scored tokens, V = vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["KLEstimator", "full_kl", "k1", "k2", "k3", "kl_estimate"]

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def k1(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """``log pi - log pi_ref``: unbiased, high variance; as a loss its expected gradient is 0."""
    return logprobs_M - reference_logprobs_M


def k2(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """``(log pi - log pi_ref)² / 2``: biased, but its expected gradient is the gradient of the KL."""
    return (logprobs_M - reference_logprobs_M).square() / 2


def k3(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """``r - 1 - log r`` with ``r = pi_ref / pi``: unbiased, never negative.

    log r is clipped at ±20 and the result at 10, which it reaches at r = 13.6: beyond it there is no gradient.
    """
    log_r = (reference_logprobs_M - logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_r.expm1() - log_r).clamp(-MAX_K3, MAX_K3)


def kl_estimate(estimator: KLEstimator, logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """Return the KL at each token, computed by the function named ``estimator``, [M]."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs_M, reference_logprobs_M)


def full_kl(logits_MV: Tensor, reference_logits_MV: Tensor) -> Tensor:
    """``Σ_v pi(v) · (log pi(v) - log pi_ref(v))`` at each token, in nats, [M]: exact, no sampling noise."""
    logprobs_MV = torch.log_softmax(logits_MV, -1)
    difference_MV = logprobs_MV - torch.log_softmax(reference_logits_MV, -1)
    return torch.where(logprobs_MV.isneginf(), 0, logprobs_MV.exp() * difference_MV).sum(-1)
