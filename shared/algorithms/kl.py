"""Estimators of ``KL(pi || pi_ref)`` from tokens sampled by pi (Schulman, "Approximating KL divergence", 2020).

Shape legend: M = scored tokens.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

__all__ = ["KLEstimator", "k1", "k2", "k3", "kl_estimate"]

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def k1(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """``log pi - log pi_ref``: unbiased, high variance; as a loss its expected gradient is 0."""
    return logprobs_M - reference_logprobs_M


def k2(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """``(log pi - log pi_ref)² / 2``: biased, but its gradient is that of the KL."""
    return (logprobs_M - reference_logprobs_M).square() / 2


def k3(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """``r - 1 - log r`` with ``r = pi_ref / pi``: unbiased, never negative. log r is cut at ±20, the result at 10."""
    log_r = (reference_logprobs_M - logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_r.expm1() - log_r).clamp(-MAX_K3, MAX_K3)


def kl_estimate(estimator: KLEstimator, logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """The estimator that is named, for each token."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs_M, reference_logprobs_M)
