"""Entropy of the policy.

Shape legend: M = scored tokens.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["sampled_entropy"]


def sampled_entropy(logprobs_M: Tensor) -> Tensor:
    """Monte-Carlo estimate of the mean entropy, in nats: ``-mean log pi`` over tokens that pi itself sampled.

    Unbiased, and free where the log-probs are known anyway.
    """
    return -logprobs_M.mean()
