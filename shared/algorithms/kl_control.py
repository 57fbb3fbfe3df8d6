"""Adaptive KL coefficient, which steers the KL to a target."""

from __future__ import annotations

import math

__all__ = ["adapt_kl_coef"]

MAX_ERROR = 0.2


def adapt_kl_coef(coef: float, kl: float, *, target: float, horizon: float, num_sequences: int) -> float:
    """``coef · (1 + clip(kl / target - 1, -0.2, 0.2) · num_sequences / horizon)`` (arXiv 1909.08593, §2.2).

    Args:
        coef: coefficient of the last update.
        kl: mean KL per sequence of that update, in nats, over the whole batch.
        target: target KL per sequence, in nats.
        horizon: sequences after which a relative error of 20 % or more has changed the coefficient by a fifth.
        num_sequences: sequences of that update.

    Returns:
        The coefficient of the next update; never negative, and unchanged if the KL is not finite.
    """
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return max(0.0, coef * (1 + error * num_sequences / horizon))
