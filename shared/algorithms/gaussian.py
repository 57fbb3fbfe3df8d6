"""Gaussian policies of continuous actions: log-probs, entropy, and squashing into (-1, 1).

Shape legend: ... = any leading dimensions, A = dimensions of an action.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["gaussian_entropy", "gaussian_logprobs", "squashed_logprobs", "squashed_sample"]


def gaussian_logprobs(actions_A: Tensor, mean_A: Tensor, log_std_A: Tensor) -> Tensor:
    """``Σ_a log N(action; mean, exp(log_std)²)`` in nats, [...]: the density of the whole action."""
    scaled_A = (actions_A - mean_A) * (-log_std_A).exp()
    return -(scaled_A.square() / 2 + log_std_A + math.log(2 * math.pi) / 2).sum(-1)


def gaussian_entropy(log_std_A: Tensor) -> Tensor:
    """``Σ_a log_std + log(2πe) / 2`` in nats, [...]."""
    return (log_std_A + math.log(2 * math.pi * math.e) / 2).sum(-1)


def squashed_logprobs(raw_A: Tensor, mean_A: Tensor, log_std_A: Tensor) -> Tensor:
    """Density of ``tanh(raw)`` where ``raw`` is Gaussian, in nats, [...] (SAC, arXiv 1801.01290, app. C, eq. 21).

    ``log N(raw) - Σ_a log(1 - tanh²(raw))`` with ``log(1 - tanh²(u)) = 2 (log 2 - u - softplus(-2u))``, which stays
    finite where tanh is 1 in floating point. Keep ``raw``: it cannot be had back from a saturated action.
    """
    correction_A = 2 * (math.log(2) - raw_A - softplus(-2 * raw_A))
    return gaussian_logprobs(raw_A, mean_A, log_std_A) - correction_A.sum(-1)


def squashed_sample(mean_A: Tensor, log_std_A: Tensor, noise_A: Tensor) -> tuple[Tensor, Tensor]:
    """Reparametrised action ``tanh(mean + std · noise)`` and its log-prob; both differentiable in mean and log_std.

    Args:
        noise_A: standard normal.

    Returns:
        actions [..., A] in [-1, 1], and log-probs [...].
    """
    raw_A = mean_A + log_std_A.exp() * noise_A
    return torch.tanh(raw_A), squashed_logprobs(raw_A, mean_A, log_std_A)
