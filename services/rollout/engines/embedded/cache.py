"""Keys and values of the running sequences, one row of a static tensor each, and of prefixes held for later requests.

Shape legend: N = layers, R = rows, L = positions, K = key/value heads, d = head width, T = flat tokens, G = query heads
that share a key/value head, S = queries of a row, Q = G * S.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.shared.models.architecture import Plan

__all__ = ["HeldSequence", "HeldSequences", "KVCache"]

GROWTH = 64
"""Granularity, in positions, to which a larger capacity is rounded up."""


class KVCache:
    """Static key and value tensors per layer, [R, K, L, d]; L grows when a longer sequence needs it."""

    def __init__(self, plan: Plan, *, rows: int, max_length: int) -> None:
        self._plan, self._rows, self._max_length = plan, rows, max_length
        self._capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

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
        """Release the memory."""
        self._keys, self._values, self._capacity = [], [], 0

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

    def attend(self, layer: int, start: int, q_RHd: Tensor, length: int, mask_R11L: Tensor | None) -> Tensor:
        """Attend one query per row to the first ``length`` positions of rows [start, start + R): [R, H, d].

        The query heads that share a key/value head are passed as G queries of that head, so keys are not repeated.
        """
        rows, plan = q_RHd.shape[0], self._plan
        k_RKLd, v_RKLd = (t[layer][start : start + rows, :, :length] for t in (self._keys, self._values))
        q_RKGd = q_RHd.view(rows, plan.num_kv_heads, -1, plan.head_dim)
        return F.scaled_dot_product_attention(q_RKGd, k_RKLd, v_RKLd, attn_mask=mask_R11L).flatten(1, 2)

    def attend_more(self, layer: int, start: int, q_RSHd: Tensor, length: int, mask_RSL: Tensor) -> Tensor:
        """Attend S queries per row to the first ``length`` positions of rows [start, start + R): [R, S, H, d]."""
        (rows, queries), plan = q_RSHd.shape[:2], self._plan
        k_RKLd, v_RKLd = (t[layer][start : start + rows, :, :length] for t in (self._keys, self._values))
        groups = q_RSHd.shape[2] // plan.num_kv_heads
        q_RKGSd = q_RSHd.view(rows, queries, plan.num_kv_heads, groups, plan.head_dim).permute(0, 2, 3, 1, 4)
        mask_R1QL = mask_RSL.repeat(1, groups, 1)[:, None]
        out_RKQd = F.scaled_dot_product_attention(q_RKGSd.flatten(2, 3), k_RKLd, v_RKLd, attn_mask=mask_R1QL)
        out_RKGSd = out_RKQd.view(rows, plan.num_kv_heads, groups, queries, plan.head_dim)
        return out_RKGSd.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def copied(self, row: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of the keys and values of the first ``length`` positions of a row, [K, L, d] per layer."""
        keys, values = ([t[row, :, :length].clone() for t in tensors] for tensors in (self._keys, self._values))
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
