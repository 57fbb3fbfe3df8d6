"""Critic losses per token, and the explained variance of returns; aggregation is a separate step.

Shape legend: M = scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.shared.algorithms.statistics import Moments

__all__ = ["clipped_value_loss", "explained_variance", "huber_error", "squared_error", "value_loss"]


def squared_error(errors_M: Tensor) -> Tensor:
    """``e² / 2``."""
    return errors_M.square() / 2


def huber_error(errors_M: Tensor, *, delta: float) -> Tensor:
    """``e² / 2`` up to ``delta``, linear beyond: ``delta · (|e| - delta / 2)`` (Huber, 1964)."""
    size_M = errors_M.abs()
    return torch.where(size_M <= delta, errors_M.square() / 2, delta * (size_M - delta / 2))


def value_loss(values_M: Tensor, returns_M: Tensor, *, error: Callable[[Tensor], Tensor]) -> Tensor:
    """``error(V - R)`` for the critic's value V and the return R of each token, [M]."""
    return error(values_M - returns_M)


def clipped_value_loss(
    values_M: Tensor,
    old_values_M: Tensor,
    returns_M: Tensor,
    *,
    clip: float,
    error: Callable[[Tensor], Tensor],
) -> Tensor:
    """``max(error(V - R), error(V_clip - R))`` with ``V_clip = V_old + clamp(V - V_old, ±clip)``, [M].

    PPO's clipped value loss (arXiv 2005.12729, §3): a value that has already moved by ``clip`` towards its target gets
    no further gradient in this update.

    Args:
        old_values_M: values before the update.
        error: ``squared_error``, or ``huber_error`` with its delta.
    """
    bounded_M = old_values_M + (values_M - old_values_M).clamp(-clip, clip)
    return torch.maximum(error(values_M - returns_M), error(bounded_M - returns_M))


def explained_variance(residuals: Moments, returns: Moments) -> float:
    """``1 - Var(R - V) / Var(R)`` for returns R and the critic's values V: 1 for a perfect critic, 0 for a critic that
    only predicts the mean.

    Returns 0 if the returns do not vary. Moments can be added over ranks: see ``statistics``.
    """
    return 1 - residuals.variance / returns.variance if returns.variance else 0.0
