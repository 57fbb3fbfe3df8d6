"""Entropy of the policy.

Shape legend: M = scored tokens, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["exact_entropy", "sampled_entropy"]


def sampled_entropy(logprobs_M: Tensor) -> Tensor:
    """Estimate the mean entropy by Monte Carlo, in nats: ``-mean log pi`` over tokens sampled from pi itself.

    Unbiased, and free if the log-probs are known. For measurement only: its gradient is not that of the entropy.
    """
    return -logprobs_M.mean()


def exact_entropy(logits_MV: Tensor) -> Tensor:
    """``-Σ_v pi(v) log pi(v)`` at each token, in nats, [M]; a logit of -inf contributes 0."""
    logprobs_MV = torch.log_softmax(logits_MV, -1)
    return -torch.where(logprobs_MV.isneginf(), 0, logprobs_MV.exp() * logprobs_MV).sum(-1)
