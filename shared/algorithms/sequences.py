"""Sums over sequences that are concatenated to flat arrays; cumulative lengths mark where each sequence begins.

Shape legend: B = sequences, B1 = B + 1, T = tokens of all sequences, N = any elements in the order of their sequences,
M = tokens in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["discounted_suffix_sums", "is_last", "sequence_of", "sequence_sum"]


def sequence_of(cu_seqlens_B1: Tensor) -> Tensor:
    """Return the number of the sequence of each token, int64 [T]."""
    lengths_B = cu_seqlens_B1.diff()
    return torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)


def is_last(sequence_N: Tensor) -> Tensor:
    """Return a bool [N] that is True at the last element of each sequence."""
    last_N = torch.ones_like(sequence_N, dtype=torch.bool)
    last_N[:-1] = sequence_N[1:] != sequence_N[:-1]
    return last_N


def sequence_sum(values_M: Tensor, rows_M: Tensor) -> Tensor:
    """Return for each token the sum of ``values_M`` over all tokens of its sequence, [M]; differentiable. ``rows_M``
    has the sequence number of each token."""
    if not len(rows_M):
        return values_M
    sums_B = values_M.new_zeros(int(rows_M.max()) + 1).index_add(0, rows_M, values_M)
    return sums_B[rows_M]


def discounted_suffix_sums(values_N: Tensor, sequence_N: Tensor, *, decay: float) -> Tensor:
    """``s_t = v_t + decay · s_{t+1}`` within each sequence, float64 [N].

    Doubling: after round k every element holds the first 2^k terms of its sum, so a sequence of L elements takes
    log2(L) rounds over the whole array instead of L steps.

    Args:
        sequence_N: number of the sequence of each element; elements of a sequence are adjacent.
    """
    sums_N = values_N.double()
    if not len(sums_N):
        return sums_N
    longest = int(torch.unique_consecutive(sequence_N, return_counts=True)[1].max())
    reach, factor = 1, decay
    while reach < longest:
        same = sequence_N[reach:] == sequence_N[:-reach]
        further = torch.where(same, sums_N[reach:], 0) * factor
        sums_N = torch.cat([sums_N[:-reach] + further, sums_N[-reach:]])
        reach, factor = 2 * reach, factor * factor
    return sums_N
