"""Mean and variance over a whole batch, from sums that can be added over ranks and runs.

Shape legend: N = any elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Moments", "moments", "whiten"]

VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, sum and sum of squares of some values. Adding the moments of parts gives the moments of the whole.

    The sums are float64: if the mean is c standard deviations from 0, the relative error of the variance is about
    c² · 1e-16.
    """

    count: float = 0.0
    total: float = 0.0
    total_squares: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the values of ``self`` and ``other`` together."""
        return Moments(
            count=self.count + other.count,
            total=self.total + other.total,
            total_squares=self.total_squares + other.total_squares,
        )

    @property
    def mean(self) -> float:
        """Mean of the values; 0 if there are no values."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Unbiased variance; 0 for fewer than two values."""
        if self.count <= 1:
            return 0.0
        return max(0.0, (self.total_squares - self.total * self.mean) / (self.count - 1))


def moments(values_N: Tensor, mask_N: Tensor) -> Moments:
    """Return the moments of the values where ``mask_N`` is not 0; other values, NaN included, are ignored."""
    chosen = values_N.detach()[mask_N.bool()].double()
    return Moments(float(len(chosen)), float(chosen.sum()), float(chosen.square().sum()))


def whiten(values_N: Tensor, mask_N: Tensor, over: Moments) -> Tensor:
    """``(v - mean) / sqrt(variance + 1e-8)`` with the moments of the whole batch, float32; 0 where ``mask_N`` is 0.

    Args:
        over: moments of the whole batch, not of one rank's part.
    """
    scaled_N = (values_N.detach().double() - over.mean) / math.sqrt(over.variance + VARIANCE_EPSILON)
    return torch.where(mask_N.bool(), scaled_N, 0).float()
