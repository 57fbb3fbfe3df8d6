"""Which tokens have to be computed before rows can be decoded; rows with equal tokens share one computation.

Shape legend: R = rows, T = flat tokens of the distinct sequences, W = tokens to write, of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.services.rollout.engines.rows import Rows
from penstock.shared.models.packed import PackedTokens, pack

__all__ = ["Prefill", "plan_prefill"]

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


def plan_prefill(rows: Rows, start: int) -> Prefill:
    """As many rows from ``start`` on as fit into the token budget, at least one."""
    found: dict[tuple[int, ...], int] = {}
    owners: list[int] = []
    num_tokens = 0
    for row in range(start, rows.count):
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
