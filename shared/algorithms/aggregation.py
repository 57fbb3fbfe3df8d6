"""Aggregation of token losses to one number. Every function gets its denominator as an argument, counted over the whole
minibatch.

The sum of these values over microbatches, each with the denominators of the minibatch, equals the value of the
minibatch: another split into microbatches changes no gradient.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

__all__ = ["Aggregation", "aggregate", "constant", "sequence_mean", "token_mean"]

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_mean(values_M: Tensor, *, num_tokens: int) -> Tensor:
    """``Σ values / num_tokens``: every token has the same weight (DAPO, arXiv 2503.14476, eq. 12)."""
    return values_M.sum() / num_tokens


def sequence_mean(values_M: Tensor, lengths_M: Tensor, *, num_sequences: int) -> Tensor:
    """Average the token losses of each sequence, then average over sequences (DeepSeekMath, arXiv 2402.03300, eq. 3).

    Args:
        lengths_M: number of scored tokens in the sequence each token belongs to.
    """
    return (values_M / lengths_M).sum() / num_sequences


def constant(values_M: Tensor, *, num_sequences: int, horizon: int) -> Tensor:
    """Divide the sum of all token losses by ``horizon`` and by the number of sequences (Dr. GRPO, arXiv 2503.20783,
    §3.2)."""
    return values_M.sum() / (num_sequences * horizon)


def aggregate(
    mode: Aggregation, values_M: Tensor, lengths_M: Tensor, *, num_tokens: int, num_sequences: int, horizon: int
) -> Tensor:
    """Return the token losses ``values_M`` aggregated to one number by the function named ``mode``."""
    match mode:
        case "token_mean":
            return token_mean(values_M, num_tokens=num_tokens)
        case "sequence_mean":
            return sequence_mean(values_M, lengths_M, num_sequences=num_sequences)
        case "constant":
            return constant(values_M, num_sequences=num_sequences, horizon=horizon)
