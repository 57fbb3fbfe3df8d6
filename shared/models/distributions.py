"""Action distributions: log-probs and entropy of each action component, and sampling as a function of noise.

Shape legend: ... = any dimensions, with one entry per action component; K = possible values of a discrete component.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = [
    "categorical_entropy",
    "categorical_logprobs",
    "choose",
    "gaussian_entropy",
    "gaussian_logprobs",
    "squashed_logprobs",
    "squashed_sample",
]


def gaussian_logprobs(numbers: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """``log N(number; mean, exp(log_std)²)`` in nats, [...]."""
    scaled = (numbers - mean) * (-log_std).exp()
    return -(scaled.square() / 2 + log_std + math.log(2 * math.pi) / 2)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """``log_std + log(2πe) / 2`` in nats, [...]."""
    return log_std + math.log(2 * math.pi * math.e) / 2


def squashed_logprobs(raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of ``tanh(raw)`` for Gaussian ``raw``, in nats, [...] (SAC, arXiv 1801.01290, app. C, eq. 21).

    ``log N(raw) - log(1 - tanh²(raw))`` with ``log(1 - tanh²(u)) = 2 (log 2 - u - softplus(-2u))``, which stays finite
    where tanh is 1 in floating point. Keep ``raw``: it cannot be recovered from a saturated action.
    """
    return gaussian_logprobs(raw, mean, log_std) - 2 * (math.log(2) - raw - softplus(-2 * raw))


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sample ``tanh(mean + std · noise)`` and its log-prob, both [...], differentiable in mean and log_std.

    Args:
        noise: standard normal.
    """
    raw = mean + log_std.exp() * noise
    return torch.tanh(raw), squashed_logprobs(raw, mean, log_std)


def choose(logits_K: Tensor, uniform: Tensor) -> Tensor:
    """Sample an index in [0, K) for each row of ``logits_K`` by the inverse CDF; return the indices, int64 [...].

    Args:
        uniform: [...] in [0, 1). The index is k where ``Σ_{j<k} p_j <= uniform < Σ_{j<=k} p_j``, in float64.
    """
    ends_K = logits_K.double().softmax(-1).cumsum(-1)
    chosen = (ends_K <= uniform.double()[..., None]).sum(-1)
    return chosen.clamp(max=logits_K.shape[-1] - 1)  # the last cumulative sum may be rounded to less than 1


def categorical_logprobs(choices: Tensor, logits_K: Tensor) -> Tensor:
    """Return the log-probs of the indices ``choices`` [...] under logits [..., K], in nats."""
    return logits_K.log_softmax(-1).gather(-1, choices[..., None])[..., 0]


def categorical_entropy(logits_K: Tensor) -> Tensor:
    """``-Σ_k p_k log p_k`` in nats, [...]."""
    logprobs_K = logits_K.log_softmax(-1)
    return -(logprobs_K.exp() * logprobs_K).sum(-1)
