"""Keys and values of the running sequences and of prefixes held for later requests. Each running sequence has one row
of a static tensor.

A row has the keys and values of its whole sequence, or of what follows a prefix that it shares with other rows.
Positions are those in the row.

Shape legend: N = layers, R = rows, L = positions, K = key/value heads, d = head width, T = flat tokens, G = query heads
that share a key/value head, S = queries of a row, Q = G * S.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.services.rollout.engines.embedded.attention import attention
from penstock.services.rollout.engines.embedded.prefixes import Prefix, Prefixes
from penstock.shared.models.architecture import Plan

__all__ = ["HeldSequence", "HeldSequences", "KVCache", "attend_more"]

GROWTH = 64
"""Granularity, in positions, to which a larger capacity is rounded up."""


class KVCache:
    """Keys and values of the rows and of the shared prefixes. Each layer stores those of the rows in two static tensors
    [R, K, L, d]; L grows with the longest row."""

    def __init__(self, plan: Plan, *, rows: int, max_length: int) -> None:
        self._plan, self._rows, self._max_length = plan, rows, max_length
        self._capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.prefixes = Prefixes(plan)

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values)) + self.prefixes.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self._plan.embedding.weight.dtype

    def reserve(self, length: int) -> None:
        """Grow the capacity to at least ``length`` tokens per row; keeps the contents."""
        if length <= self._capacity:
            return
        capacity = min(self._max_length, max(2 * self._capacity, length + -length % GROWTH))
        self._keys = self._grown(self._keys, capacity)
        self._values = self._grown(self._values, capacity)
        self._capacity = capacity

    def _grown(self, old: list[Tensor], capacity: int) -> list[Tensor]:
        plan, weight = self._plan, self._plan.embedding.weight
        shape = (self._rows, plan.num_kv_heads, capacity, plan.head_dim)
        new = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in plan.layers]
        for source, target in zip(old, new, strict=bool(old)):
            target[:, :, : self._capacity] = source
        return new

    def release(self) -> None:
        """Release the memory; no row may be in use."""
        self._keys, self._values, self._capacity = [], [], 0
        self.prefixes = Prefixes(self._plan)

    def zero(self) -> None:
        """Set all keys and values to zero. Needed after a non-finite value: a masked NaN still makes attention NaN."""
        for tensor in (*self._keys, *self._values):
            tensor.zero_()

    def places(self, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the flat cache indices of each (row, position), one per key/value head, for ``write``: [T * K]."""
        heads_K = torch.arange(self._plan.num_kv_heads, device=rows_T.device) * self._capacity
        first_T = rows_T * (self._plan.num_kv_heads * self._capacity) + positions_T
        return (first_T[:, None] + heads_K).flatten()

    def write(self, layer: int, places: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Store keys and values of flat tokens at ``places``."""
        self._keys[layer].flatten(0, 2).index_copy_(0, places, k_TKd.flatten(0, 1))
        self._values[layer].flatten(0, 2).index_copy_(0, places, v_TKd.flatten(0, 1))

    def attend(
        self, layer: int, start: int, q_RHd: Tensor, length: int, mask_R11L: Tensor | None, *, lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend one query per row to the first ``length`` positions of rows [start, start + R): [R, H, d].

        The query heads that share a key/value head are passed as G queries of that head, so keys are not repeated.
        Also returns the log-sum-exp of the scores, [R, H], if ``lse`` is set.
        """
        rows, plan = q_RHd.shape[0], self._plan
        k_RKLd, v_RKLd = self.read(layer, start, rows, length)
        q_RKGd = q_RHd.view(rows, plan.num_kv_heads, -1, plan.head_dim)
        out_RKGd, lse_RKG = attention(q_RKGd, k_RKLd, v_RKLd, mask_R11L, lse=lse)
        return out_RKGd.flatten(1, 2), lse_RKG.flatten(1) if lse_RKG is not None else None

    def read(self, layer: int, start: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [R, K, L, d] of the first ``length`` positions of ``rows`` rows from ``start``."""
        k_RKLd, v_RKLd = (t[layer][start : start + rows, :, :length] for t in (self._keys, self._values))
        return k_RKLd, v_RKLd

    def copied(self, row: int, length: int, prefix: Prefix | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of keys and values, [K, L, d] per layer: those of ``prefix``, followed by those of the first
        ``length`` positions of a row."""
        keys, values = ([t[row, :, :length].clone() for t in tensors] for tensors in (self._keys, self._values))
        if prefix is None:
            return keys, values
        both = (zip(shared, own, strict=True) for shared, own in ((prefix.keys, keys), (prefix.values, values)))
        keys, values = ([torch.cat(pair, 1) for pair in pairs] for pairs in both)
        return keys, values

    def restore(self, row: int, keys: list[Tensor], values: list[Tensor]) -> None:
        """Write keys and values from ``copied`` to the first positions of a row; the capacity must suffice."""
        for tensors, copies in ((self._keys, keys), (self._values, values)):
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor[row, :, : copy.shape[1]] = copy

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of rows ``sources`` to rows ``targets``. All reads precede all writes."""
        for tensor in (*self._keys, *self._values):
            part = tensor[:, :, :length]
            part.index_copy_(0, targets, part.index_select(0, sources))


def attend_more(
    q_RSHd: Tensor, k_RKLd: Tensor, v_RKLd: Tensor, mask_RSL: Tensor, *, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the attention outputs [R, S, H, d] of S queries per row over L positions of the same row.

    Also returns the log-sum-exp of the scores, [R, S, H], if ``lse`` is set.
    """
    (rows, queries, heads, width), kv_heads = q_RSHd.shape, k_RKLd.shape[1]
    groups = heads // kv_heads
    q_RKGSd = q_RSHd.view(rows, queries, kv_heads, groups, width).permute(0, 2, 3, 1, 4)
    mask_R1QL = mask_RSL.repeat(1, groups, 1)[:, None]
    out_RKQd, lse_RKQ = attention(q_RKGSd.flatten(2, 3), k_RKLd, v_RKLd, mask_R1QL, lse=lse)
    out_RSHd = out_RKQd.view(rows, heads, queries, width).transpose(1, 2)
    return out_RSHd, lse_RKQ.reshape(rows, heads, queries).transpose(1, 2) if lse_RKQ is not None else None


@dataclass(frozen=True, slots=True, eq=False)
class HeldSequence:
    """Computed prefix ``token_ids`` [L] with its keys and values [K, L, d] per layer."""

    token_ids: list[int]
    keys: list[Tensor]
    values: list[Tensor]


class HeldSequences:
    """Holds at most ``limit`` prefixes, one per session; evicts the oldest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, HeldSequence] = OrderedDict()

    def keep(self, session: str, sequence: HeldSequence) -> None:
        """Hold a prefix for the next request of its session; replaces an earlier one of the session."""
        self._held[session] = sequence
        self._held.move_to_end(session)
        if len(self._held) > self._limit:
            self._held.popitem(last=False)

    def take(self, session: str, prompt_ids: Sequence[int]) -> HeldSequence | None:
        """Remove the prefix of the session and return it; None if absent or if ``prompt_ids`` does not extend it."""
        found = self._held.pop(session, None)
        if found is None or len(found.token_ids) >= len(prompt_ids):
            return None
        return found if list(prompt_ids[: len(found.token_ids)]) == found.token_ids else None

    def clear(self) -> None:
        """Drop all prefixes."""
        self._held.clear()
