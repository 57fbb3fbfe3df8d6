"""Which tokens have to be computed before rows can be decoded; rows with equal tokens share one computation.

Shape legend: R = rows, T = flat tokens of the distinct sequences, W = tokens to write, of all rows, S = new tokens of a
row, L = positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.services.rollout.engines.rows import Rows
from penstock.shared.models.packed import PackedTokens, pack

__all__ = ["Extension", "Prefill", "plan_extension", "plan_prefill"]

PREFILL_TOKENS = 2048
"""Distinct tokens computed at once (one row may have more)."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows [start, stop): their distinct sequences, and how computed tokens go to rows."""

    start: int
    stop: int
    tokens: PackedTokens
    last_R: Tensor
    """Flat index of each row's last token."""
    source_W: Tensor | None
    """Flat index of the token to write; None where every row has its own sequence."""
    row_W: Tensor
    position_W: Tensor


@dataclass(frozen=True, slots=True)
class Extension:
    """Rows [start, stop) that have a part of their sequence in the cache; T are the tokens that follow it."""

    start: int
    stop: int
    token_T: Tensor
    position_T: Tensor
    row_T: Tensor
    """Row counted from ``start``, and ``offset_T`` among the new tokens of that row."""
    offset_T: Tensor
    last_R: Tensor
    """Flat index of each row's last token."""
    num_new: int
    """S."""
    length: int
    """L: tokens of the longest row."""


def plan_extension(rows: Rows, start: int) -> Extension:
    """As many rows from ``start`` on as have a cached part and fit into the token budget, at least one."""
    new: list[list[int]] = []
    cached: list[int] = []
    for row in range(start, rows.count):
        known = rows.completions[row].num_cached
        tokens = list(rows.sequence(row)[known:])
        longest = max(len(tokens), *map(len, new)) if new else len(tokens)
        if not known or (new and longest * (len(new) + 1) > PREFILL_TOKENS):
            break
        new.append(tokens)
        cached.append(known)
    length_R = np.array([len(tokens) for tokens in new])
    ends_R = np.cumsum(length_R)
    offset_T = np.arange(ends_R[-1]) - np.repeat(ends_R - length_R, length_R)
    device = rows.length_R.device
    return Extension(
        start=start,
        stop=start + len(new),
        token_T=torch.tensor([token for tokens in new for token in tokens], device=device),
        position_T=torch.from_numpy(np.repeat(cached, length_R) + offset_T).to(device),
        row_T=torch.from_numpy(np.repeat(np.arange(len(new)), length_R)).to(device),
        offset_T=torch.from_numpy(offset_T).to(device),
        last_R=torch.from_numpy(ends_R - 1).to(device),
        num_new=int(length_R.max()),
        length=int((np.array(cached) + length_R).max()),
    )


def plan_prefill(rows: Rows, start: int) -> Prefill:
    """As many rows from ``start`` on as have nothing in the cache and fit into the token budget, at least one."""
    found: dict[tuple[int, ...], int] = {}
    owners: list[int] = []
    num_tokens = 0
    for row in range(start, rows.count):
        if owners and rows.completions[row].num_cached:
            break
        sequence = tuple(rows.sequence(row))
        if sequence not in found:
            num_tokens += len(sequence)
            if owners and num_tokens > PREFILL_TOKENS:
                break
        owners.append(found.setdefault(sequence, len(found)))
    return _prefill(list(found)[: max(owners) + 1], np.array(owners), start, rows.length_R.device)


def _prefill(sequences: list[tuple[int, ...]], owner_R: np.ndarray, start: int, device: torch.device) -> Prefill:
    tokens = pack(sequences)
    length_R = np.asarray(tokens.lengths)[owner_R]
    first_R = tokens.cu_seqlens_S1.numpy()[owner_R]
    ends_R = np.cumsum(length_R)
    position_W = np.arange(ends_R[-1]) - np.repeat(ends_R - length_R, length_R)
    shared = len(sequences) < len(owner_R)
    row_W = np.repeat(np.arange(start, start + len(owner_R)), length_R)
    source_W = np.repeat(first_R, length_R) + position_W if shared else None
    return Prefill(
        start=start,
        stop=start + len(owner_R),
        tokens=tokens.to(device),
        last_R=torch.from_numpy(first_R + length_R - 1).to(device),
        source_W=None if source_W is None else torch.from_numpy(source_W).to(device),
        row_W=torch.from_numpy(row_W).to(device),
        position_W=torch.from_numpy(position_W).to(device),
    )
