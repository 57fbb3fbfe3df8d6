"""Token sampling: exact log-probs, and random numbers that depend only on seed and position, not on the batch.

Shape legend: R = rows, V = vocabulary, K = stop tokens of a row (padded with -1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Draws", "draw", "likeliest", "stream_of", "uniforms"]

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def stream_of(seed: int) -> int:
    """Return the initial state of a random stream as a signed 64-bit number: SplitMix64's output for ``seed``."""
    z = (seed * _GAMMA + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return _signed(z ^ (z >> 31))


def uniforms(stream_R: Tensor, index_R: Tensor) -> Tensor:
    """Return one number in [0, 1) per row, float64: output ``index`` of SplitMix64 started at ``stream``.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), figure 17.
    """
    z = stream_R + (index_R + 1) * _signed(_GAMMA)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Return the logical right shift; torch's operator is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of the next token of each row. A field that no row needs is None and costs nothing."""

    stream_R: Tensor
    index_R: Tensor
    """Number of output tokens of the row so far."""
    temperature_R1: Tensor | None
    """Temperature of each row; None if all are 1. Greedy rows have 1: their log-probs come from the unscaled logits."""
    greedy_R: Tensor | None
    all_greedy: bool
    top_p_R: Tensor | None
    top_k_R: Tensor | None
    forbidden_RK: Tensor | None
    """Token ids that must not be sampled now; -1 is padding."""
    nudge_RV: Tensor | None = None
    """Penalties and logit biases, added to the logits for sampling but not for the reported log-probs."""
    allowed_RV: Tensor | None = None
    """Boolean mask of the tokens that satisfy the constraint; at least one per row."""


def draw(logits_RV: Tensor, how: Draws) -> tuple[Tensor, Tensor]:
    """Sample one token per row; return the tokens and their log-probs, float32, under softmax(logits / temperature).

    Truncation (top-p, top-k), penalties, logit biases, and forbidden and allowed tokens change which token is sampled,
    but not its log-prob.
    """
    logits_RV = logits_RV.float()
    if how.temperature_R1 is not None:
        logits_RV = logits_RV / how.temperature_R1
    logprobs_RV = torch.log_softmax(logits_RV, -1)
    allowed_RV = logprobs_RV
    if how.nudge_RV is not None:
        nudge_RV = how.nudge_RV if how.temperature_R1 is None else how.nudge_RV / how.temperature_R1
        allowed_RV = torch.log_softmax(logprobs_RV + nudge_RV, -1)
    if how.allowed_RV is not None:  # renormalise: allowed tokens may be so unlikely that exp would underflow
        allowed_RV = torch.log_softmax(allowed_RV.masked_fill(~how.allowed_RV, float("-inf")), -1)
    if how.forbidden_RK is not None:
        allowed_RV = _without(allowed_RV, how.forbidden_RK)
    token_R = allowed_RV.argmax(-1) if how.all_greedy else _sample(allowed_RV, how)
    if how.greedy_R is not None and not how.all_greedy:
        token_R = torch.where(how.greedy_R, allowed_RV.argmax(-1), token_R)
    return token_R, logprobs_RV.gather(-1, token_R[:, None])[:, 0]


def likeliest(logits_RV: Tensor, how: Draws, num: int) -> tuple[Tensor, Tensor]:
    """Return log-probs and ids of the ``num`` most likely tokens of each row, under softmax(logits / temperature)."""
    logits_RV = logits_RV.float()
    if how.temperature_R1 is not None:
        logits_RV = logits_RV / how.temperature_R1
    return torch.log_softmax(logits_RV, -1).topk(min(num, logits_RV.shape[-1]), -1)


def _sample(logprobs_RV: Tensor, how: Draws) -> Tensor:
    """Sample by inverting the cumulative distribution at one uniform number per row."""
    probs_RV = logprobs_RV.exp()
    if how.top_p_R is not None or how.top_k_R is not None:
        probs_RV = _truncate(probs_RV, how.top_p_R, how.top_k_R)
    cumulative_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    point_R1 = uniforms(how.stream_R, how.index_R)[:, None] * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, point_R1, right=True)[:, 0].clamp_max(probs_RV.shape[-1] - 1)


def _truncate(probs_RV: Tensor, top_p_R: Tensor | None, top_k_R: Tensor | None) -> Tensor:
    sorted_RV, order_RV = probs_RV.sort(-1, descending=True)
    keep_RV = torch.ones_like(sorted_RV, dtype=torch.bool)
    if top_p_R is not None:  # smallest set whose mass reaches top_p: keep a token if the mass before it is below top_p
        mass_RV = sorted_RV.cumsum(-1)
        keep_RV &= mass_RV - sorted_RV < top_p_R[:, None] * mass_RV[:, -1:]
    if top_k_R is not None:
        rank_V = torch.arange(probs_RV.shape[-1], device=probs_RV.device)
        keep_RV &= (rank_V < top_k_R[:, None]) | (top_k_R == 0)[:, None]
    keep_RV[:, 0] = True
    return torch.zeros_like(probs_RV).scatter_(-1, order_RV, sorted_RV * keep_RV)


def _without(logprobs_RV: Tensor, forbidden_RK: Tensor) -> Tensor:
    rows, vocab = logprobs_RV.shape
    marked = torch.zeros((rows, vocab + 1), dtype=torch.bool, device=logprobs_RV.device)  # last column: padding
    marked.scatter_(-1, torch.where(forbidden_RK < 0, vocab, forbidden_RK), True)
    return logprobs_RV.masked_fill(marked[:, :vocab], float("-inf"))
