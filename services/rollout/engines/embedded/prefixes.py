"""Prefixes that several rows share: the prompt of a group has its keys and values in memory once.

A prefix is a prompt without its last token. That token is the first one in each row's own part of the cache: a row
that joins a computed prefix later can decode at once, because its last token is computed in any case.

Shape legend: R = rows, P = tokens of a prefix, T = flat tokens, S = flat tokens of rows with a prefix, H = query heads,
K = key/value heads, G = query heads that share a key/value head, d = head width, Q = S * G.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.embedded.attention import attention_lse, merged
from penstock.shared.models.architecture import Plan

__all__ = ["Prefix", "PrefixQueries", "Prefixes", "shared_from"]

SHARED_FROM = 128
"""Tokens of the shortest prefix that rows share on a CPU: below, a second attention call takes longer than the reads
that it saves (docs/adr/0029)."""
SHARED_FROM_ELSEWHERE = 1024
"""The same on other devices, where each prefix costs kernel launches. Estimated, not measured."""


def shared_from(device: torch.device) -> int:
    """Return the length in tokens from which prefixes are shared on this device."""
    return SHARED_FROM if device.type == "cpu" else SHARED_FROM_ELSEWHERE


class Prefix:
    """Tokens that rows begin with, and the keys and values of these tokens, [K, P, d] per layer.

    Attention reads only positions that were computed under the served weights: others need not be zeroed.
    """

    def __init__(self, plan: Plan, token_ids: tuple[int, ...]) -> None:
        weight, shape = plan.embedding.weight, (plan.num_kv_heads, len(token_ids), plan.head_dim)
        self.token_ids = token_ids
        self.keys, self.values = (
            [torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in plan.layers] for _ in range(2)
        )
        self.num_rows = 0
        """Number of rows that begin with it."""
        self.num_cached = 0
        """Number of tokens whose keys and values are computed."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_complete(self) -> bool:
        """True if all keys and values are computed."""
        return self.num_cached == len(self)

    def write(self, layer: int, start: int, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Store keys and values of the tokens from ``start`` on."""
        stop = start + len(k_TKd)
        self.keys[layer][:, start:stop] = k_TKd.transpose(0, 1)
        self.values[layer][:, start:stop] = v_TKd.transpose(0, 1)


class Prefixes:
    """Shared prefixes in use, each with the number of rows that begin with the prefix.

    A prefix without rows is freed by ``free_unused``: rows may end before other completions of the group are admitted.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._by_tokens: dict[tuple[int, ...], Prefix] = {}
        self._of: dict[Completion, Prefix] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(tensor.nbytes for one in self._by_tokens.values() for tensor in (*one.keys, *one.values))

    def of(self, completion: Completion) -> Prefix | None:
        """Return the shared prefix of a row; None if the row has none."""
        return self._of.get(completion)

    def join(self, completions: Sequence[Completion], following: Completion | None, *, at_least: int) -> None:
        """Assign shared prefixes to new rows: an existing prefix, or a new one if several rows begin with the same
        tokens.

        Args:
            following: the next completion that will be admitted, if one waits.
            at_least: number of tokens of the shortest prefix that is shared.
        """
        wanted = [(completion, _prefix_of(completion)) for completion in completions]
        counts = Counter(token_ids for _, token_ids in wanted if len(token_ids) >= at_least)
        if following is not None:
            counts[_prefix_of(following)] += 1
        for completion, token_ids in wanted:
            prefix = self._by_tokens.get(token_ids)
            if prefix is None and len(token_ids) >= at_least and counts[token_ids] > 1:
                prefix = self._by_tokens[token_ids] = Prefix(self._plan, token_ids)
            if prefix is not None:
                prefix.num_rows += 1
                self._of[completion] = prefix

    def leave(self, completion: Completion) -> None:
        """Detach a removed row from its prefix."""
        prefix = self._of.pop(completion, None)
        if prefix is not None:
            prefix.num_rows -= 1

    def free_unused(self) -> None:
        """Free the prefixes that no row begins with any more."""
        if len(self._by_tokens):
            self._by_tokens = {token_ids: one for token_ids, one in self._by_tokens.items() if one.num_rows}

    def drop(self) -> None:
        """Mark the keys and values of all prefixes as not computed, and free the prefixes without rows."""
        self.free_unused()
        for prefix in self._by_tokens.values():
            prefix.num_cached = 0


def _prefix_of(completion: Completion) -> tuple[int, ...]:
    return tuple(completion.prompt_ids[: max(0, len(completion.prompt_ids) - completion.num_begun - 1)])


class PrefixQueries:
    """Queries of a part's tokens, ordered by the shared prefix that they attend to.

    Args:
        prefixes: those that at least one row has, each once.
        index_R: index in ``prefixes`` of each row of the part; -1: none.
        length_R: number of flat tokens of each row.
    """

    def __init__(
        self, prefixes: Sequence[Prefix], index_R: NDArray[Any], length_R: NDArray[Any], device: torch.device
    ) -> None:
        index_T = np.repeat(index_R, length_R)
        order_S = np.argsort(index_T, kind="stable")[int((index_T < 0).sum()) :]
        in_order = len(order_S) == len(index_T) and bool((np.diff(order_S) == 1).all())
        self._place_S = None if in_order else torch.from_numpy(order_S).to(device)
        self._prefixes = prefixes
        self._sizes = np.bincount(index_T[order_S], minlength=len(prefixes)).tolist()

    @classmethod
    def of(
        cls, prefixes: Sequence[Prefix | None], length_R: NDArray[Any], device: torch.device
    ) -> PrefixQueries | None:
        """Return the queries of rows with these prefixes and ``length_R`` tokens per row; None if no row has a
        prefix."""
        found: dict[Prefix, int] = {}
        index_R = np.array([-1 if one is None else found.setdefault(one, len(found)) for one in prefixes])
        return cls(list(found), index_R, length_R, device) if found else None

    def attend(self, layer: int, q_THd: Tensor, out_THd: Tensor, lse_TH: Tensor) -> Tensor:
        """Merge the attention to the shared prefixes into the attention to the rows' own tokens, which is given as
        ``out_THd`` with its log-sum-exp ``lse_TH``. Return the attention to both, [T, H, d]."""
        place_S = self._place_S
        if place_S is None:
            return merged(out_THd, lse_TH, *self._attend(layer, q_THd))
        shared = self._attend(layer, q_THd.index_select(0, place_S))
        both_SHd = merged(out_THd.index_select(0, place_S), lse_TH.index_select(0, place_S), *shared)
        return out_THd.index_copy(0, place_S, both_SHd)

    def _attend(self, layer: int, q_SHd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention to the prefixes alone, and its log-sum-exp."""
        (num, heads, width), kv_heads = q_SHd.shape, self._prefixes[0].keys[layer].shape[0]
        groups = heads // kv_heads
        q_1KQd = q_SHd.view(num, kv_heads, groups, width).transpose(0, 1).reshape(1, kv_heads, num * groups, width)
        own = torch.split(q_1KQd, [size * groups for size in self._sizes], 2)
        found = [
            attention_lse(q, prefix.keys[layer][None], prefix.values[layer][None])
            for prefix, q in zip(self._prefixes, own, strict=True)
        ]
        out_1KQd, lse_1KQ = torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2)
        out_SHd = out_1KQd.view(kv_heads, num, groups, width).transpose(0, 1).reshape(num, heads, width)
        return out_SHd, lse_1KQ.view(kv_heads, num, groups).transpose(0, 1).reshape(num, heads)
