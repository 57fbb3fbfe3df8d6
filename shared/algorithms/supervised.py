"""Losses for off-policy answers: imitation, and preferences.

Shape legend: M = scored tokens, S = sequences, P = pairs of a chosen and a rejected answer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

__all__ = ["dpo_loss", "sequence_logprobs", "supervised_loss"]


def supervised_loss(logprobs_M: Tensor) -> Tensor:
    """``-log pi`` of each token of a demonstration, [M]; aggregation is a separate step."""
    return -logprobs_M


def sequence_logprobs(logprobs_M: Tensor, rows_M: Tensor, *, num_rows: int, normalise: bool) -> Tensor:
    """Return the log-prob of each whole sequence, [S]: the sum over its tokens, or with ``normalise`` their mean.

    Args:
        rows_M: int64, sequence of each token, below ``num_rows``. A sequence without tokens gets 0.
    """
    sums_S = logprobs_M.new_zeros(num_rows).index_add(0, rows_M, logprobs_M)
    if not normalise:
        return sums_S
    return sums_S / torch.bincount(rows_M, minlength=num_rows).clamp_min(1)


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Return the DPO loss of each pair, [P]: ``-(1 - ε) log σ(h) - ε log σ(-h)`` with the margin
    ``h = beta · ((log pi(chosen) - log ref(chosen)) - (log pi(rejected) - log ref(rejected)))``.

    Source: DPO, arXiv 2305.18290, eq. 7; label smoothing ε: Mitchell, 2023.

    Args:
        chosen_P, rejected_P: log-probs by the policy, from ``sequence_logprobs``; if they are normalized, long answers
            have no larger weight than short ones.
        beta: strength of the constraint to the reference.
        label_smoothing: ε in [0, 0.5), probability that the two answers of a pair are swapped.
    """
    h_P = beta * ((chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P))
    return -(1 - label_smoothing) * logsigmoid(h_P) - label_smoothing * logsigmoid(-h_P)
