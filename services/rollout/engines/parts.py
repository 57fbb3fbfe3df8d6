"""Parts of a forward pass: rows that decode, rows computed from all their tokens, rows that extend a cached prefix.

A pass computes the tokens of all its parts together; only attention differs per part. The prompt of a new request is
therefore computed in the same step in which running rows get their next token: neither waits for the other.

Shape legend: R = rows of a part, T = flat tokens of a part, W = keys and values to write, S = new tokens of a row,
L = positions, H = query heads, K = key/value heads, d = head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.rollout.engines.cache import KVCache
from penstock.services.rollout.engines.grouping import Group
from penstock.services.rollout.engines.rows import Rows
from penstock.shared.models.attention import CausalBlocks
from penstock.shared.models.decoder import Attend
from penstock.shared.models.packed import pack

__all__ = ["Part", "decoding", "extending", "passes", "prefilling", "together"]

PASS_TOKENS = 2048
"""Maximum number of tokens of rows that are not decoding, per pass; a single row may have more."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, stop) in a forward pass, with their tokens and their attention."""

    start: int
    stop: int
    token_T: Tensor
    position_T: Tensor
    last_R: Tensor
    """Index in T of each row's last token, after which the next token is sampled."""
    row_W: Tensor
    position_W: Tensor
    source_W: Tensor | None
    """Index in T of the token whose keys and values go to each place W; None: W equals T."""
    attend: Attend
    """Writes keys and values of the tokens to the cache and computes attention: [T, H, d]."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.token_T)

    def written(self, x_T: Tensor) -> Tensor:
        """Gather values per token [T, ...] into values per written place [W, ...]."""
        return x_T if self.source_W is None else x_T[self.source_W]


def passes(rows: Rows, cache: KVCache, fresh: int, groups: Sequence[Group]) -> Iterator[list[Part]]:
    """Yield the parts of each forward pass, covering all rows in order: the first ``fresh`` rows decode, in ``groups``;
    the others are computed from their tokens."""
    parts = [decoding(rows, cache, groups)] if fresh else []
    row, num_tokens = fresh, 0
    while row < rows.count:
        part = (extending if rows.completions[row].num_cached else prefilling)(rows, cache, row)
        if num_tokens and num_tokens + part.num_tokens > PASS_TOKENS:
            yield parts
            parts, num_tokens = [], 0
        parts.append(part)
        row, num_tokens = part.stop, num_tokens + part.num_tokens
    yield parts


def together(parts: Sequence[Part]) -> Attend:
    """Return an ``Attend`` that applies the attention of each part to its own tokens of the pass."""
    if len(parts) == 1:
        return parts[0].attend
    sizes = [part.num_tokens for part in parts]

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        own = zip(parts, *(torch.split(x_THd, sizes) for x_THd in (q_THd, k_TKd, v_TKd)), strict=True)
        return torch.cat([part.attend(layer, q, k, v) for part, q, k, v in own])

    return attend


def decoding(rows: Rows, cache: KVCache, groups: Sequence[Group]) -> Part:
    """Build the part of the fresh rows, of which only the last token is not in the cache."""
    stop = groups[-1].stop
    position_R = rows.length_R[:stop] - 1
    row_R = torch.arange(stop, device=position_R.device)
    place_R = cache.places(row_R, position_R)
    masks = _masks(position_R, groups, cache.dtype)

    def attend(layer: int, q_RHd: Tensor, k_RKd: Tensor, v_RKd: Tensor) -> Tensor:
        cache.write(layer, place_R, k_RKd, v_RKd)
        own = [
            cache.attend(layer, group.start, q_RHd[group.start : group.stop], group.longest, mask)
            for group, mask in zip(groups, masks, strict=True)
        ]
        return own[0] if len(own) == 1 else torch.cat(own)

    token_R = rows.tokens_RC[:stop].gather(1, position_R[:, None])[:, 0]
    return Part(0, stop, token_R, position_R, row_R, row_R, position_R, None, attend)


def _masks(position_R: Tensor, groups: Sequence[Group], dtype: torch.dtype) -> list[Tensor | None]:
    """Return a mask per group that hides padding, [R, 1, 1, L]; None if all rows of the group are equally long."""
    longest = max((group.longest for group in groups if group.shortest < group.longest), default=0)
    if not longest:
        return [None] * len(groups)
    hidden_RL = torch.arange(longest, device=position_R.device) > position_R[:, None]
    mask_RL = torch.zeros(hidden_RL.shape, dtype=dtype, device=position_R.device)
    mask_R11L = mask_RL.masked_fill_(hidden_RL, float("-inf"))[:, None, None]
    return [
        None if group.shortest == group.longest else mask_R11L[group.start : group.stop, ..., : group.longest]
        for group in groups
    ]


def prefilling(rows: Rows, cache: KVCache, start: int) -> Part:
    """Build a part of rows from ``start`` on without cached tokens: at least one, as many as fit in ``PASS_TOKENS``.

    Identical sequences are computed once.
    """
    found: dict[tuple[int, ...], int] = {}
    owners: list[int] = []
    num_tokens = 0
    for row in range(start, rows.count):
        if owners and rows.completions[row].num_cached:
            break
        sequence = tuple(rows.sequence(row))
        if sequence not in found:
            num_tokens += len(sequence)
            if owners and num_tokens > PASS_TOKENS:
                break
        owners.append(found.setdefault(sequence, len(found)))
    device, owner_R = rows.length_R.device, np.array(owners)
    packed = pack(list(found)[: max(owners) + 1])
    length_R = np.asarray(packed.lengths)[owner_R]
    first_R = packed.cu_seqlens_S1.numpy()[owner_R]
    position_W = _offsets(length_R)
    shared = len(packed.lengths) < len(owners)
    source_W = torch.from_numpy(np.repeat(first_R, length_R) + position_W).to(device) if shared else None
    tokens = packed.to(device)
    blocks = CausalBlocks.of(tokens)
    at_W = torch.from_numpy(np.repeat(np.arange(start, start + len(owners)), length_R)).to(device)
    offset_W = torch.from_numpy(position_W).to(device)
    place_W = cache.places(at_W, offset_W)

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        cache.write(layer, place_W, part.written(k_TKd), part.written(v_TKd))
        return blocks.attend(q_THd, k_TKd, v_TKd)

    last_R = torch.from_numpy(first_R + length_R - 1).to(device)
    stop = start + len(owners)
    part = Part(start, stop, tokens.token_ids_T, tokens.position_ids_T, last_R, at_W, offset_W, source_W, attend)
    return part


def extending(rows: Rows, cache: KVCache, start: int) -> Part:
    """Build a part of rows from ``start`` on that have a cached prefix: at least one, as many as fit in
    ``PASS_TOKENS``."""
    new: list[list[int]] = []
    cached: list[int] = []
    for row in range(start, rows.count):
        known = rows.completions[row].num_cached
        tokens = list(rows.sequence(row)[known:])
        longest = max(len(tokens), *map(len, new)) if new else len(tokens)
        if not known or (new and longest * (len(new) + 1) > PASS_TOKENS):
            break
        new.append(tokens)
        cached.append(known)
    device, length_R = rows.length_R.device, np.array([len(tokens) for tokens in new])
    offset_T = _offsets(length_R)
    position_T = torch.from_numpy(np.repeat(cached, length_R) + offset_T).to(device)
    row_T = torch.from_numpy(np.repeat(np.arange(len(new)), length_R)).to(device)
    place_T = cache.places(start + row_T, position_T)
    num_new, length = int(length_R.max()), int((np.array(cached) + length_R).max())
    at = row_T, torch.from_numpy(offset_T).to(device)
    hidden_TL = torch.arange(length, device=device) > position_T[:, None]
    mask_RSL = torch.zeros((len(new), num_new, length), dtype=cache.dtype, device=device)
    mask_RSL[at] = mask_RSL[at].masked_fill(hidden_TL, float("-inf"))

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        cache.write(layer, place_T, k_TKd, v_TKd)
        q_RSHd = q_THd.new_zeros((len(new), num_new, *q_THd.shape[1:]))
        q_RSHd[at] = q_THd
        return cache.attend_more(layer, start, q_RSHd, length, mask_RSL)[at]

    token_T = torch.tensor([token for tokens in new for token in tokens], device=device)
    last_R = torch.from_numpy(np.cumsum(length_R) - 1).to(device)
    return Part(start, start + len(new), token_T, position_T, last_R, start + row_T, position_T, None, attend)


def _offsets(length_R: NDArray[Any]) -> NDArray[Any]:
    """Return the positions 0, 1, ... within each row, concatenated: [sum of ``length_R``]."""
    ends_R = np.cumsum(length_R)
    offset_T: NDArray[Any] = np.arange(ends_R[-1]) - np.repeat(ends_R - length_R, length_R)
    return offset_T
