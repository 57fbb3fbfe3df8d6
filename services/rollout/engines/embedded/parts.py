"""Parts of a forward pass: rows that decode, rows computed from all their tokens, rows that extend a cached prefix, and
prefixes that rows share.

A pass computes the tokens of all its parts together; only attention differs per part. The prompt of a new request is
therefore computed in the same step in which running rows get their next token: neither waits for the other. A pass has
a bounded number of tokens; a longer prompt takes several passes, in each of which the running rows get a token.
Shared prefixes come first: in each layer, the rows of the same pass attend to keys and values that are just written.

Shape legend: R = rows of a part, T = flat tokens of a part, W = keys and values to write, S = new tokens of a row,
L = positions, H = query heads, K = key/value heads, d = head width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.rollout.engines.embedded.cache import KVCache, attend_more
from penstock.services.rollout.engines.embedded.grouping import Group
from penstock.services.rollout.engines.embedded.prefixes import Prefix, PrefixQueries
from penstock.services.rollout.engines.embedded.rows import Rows
from penstock.shared.models.attention import CausalBlocks
from penstock.shared.models.decoder import Attend
from penstock.shared.models.packed import pack

__all__ = ["Part", "computing", "decoding", "extending", "next_pass", "prefilling", "together"]

PASS_TOKENS = 2048
"""Maximum number of tokens of rows that are not decoding, per pass."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, stop) in a forward pass, with their tokens and their attention; or a shared prefix, without rows."""

    start: int
    stop: int
    token_T: Tensor
    position_T: Tensor
    last_R: Tensor
    """Index in T of each row's last token, after which the next token is sampled; empty if ``num_cached`` > 0."""
    row_W: Tensor
    position_W: Tensor
    source_W: Tensor | None
    """Index in T of the token of each cache entry to write, [W]; None: every token has one entry, in the same order."""
    attend: Attend
    """Function that writes the tokens' keys and values to the cache and returns the attention outputs, [T, H, d]."""
    num_cached: int = 0
    """Number of tokens of each row in the cache after this pass, if the pass leaves the rows incomplete; else 0. Of a
    shared prefix: in any case."""
    prefix: Prefix | None = None
    """Shared prefix that the part computes."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.token_T)

    def written(self, x_T: Tensor) -> Tensor:
        """Return the values to write to the cache, [W, ...], gathered from values per token, [T, ...]."""
        return x_T if self.source_W is None else x_T[self.source_W]


def next_pass(rows: Rows, cache: KVCache, fresh: int, groups: Sequence[Group]) -> list[Part]:
    """Return the parts of the next forward pass: adjacent rows from row 0 on, and before them the shared prefixes that
    they need.

    The first ``fresh`` rows decode, in ``groups``. As many of the next rows follow as fit in ``PASS_TOKENS`` tokens,
    after the prefixes that they share. The last part, or the last prefix, may compute only the beginning of more than
    ``PASS_TOKENS`` tokens.
    """
    before: list[Part] = []
    parts = [decoding(rows, cache, groups)] if fresh else []
    ready: set[Prefix] = set()
    row, room = fresh, PASS_TOKENS
    while row < rows.count:
        prefix = cache.prefixes.of(rows.completions[row])
        if prefix is not None and not prefix.is_complete and prefix not in ready:
            shared = computing(prefix, cache, row, room)
            if shared is None:
                break
            before.append(shared)
            room -= shared.num_tokens
            if shared.num_cached < len(prefix):
                break
            ready.add(prefix)
        if _known(rows, cache, row, ready):
            part = extending(rows, cache, row, room, ready)
        else:
            part = prefilling(rows, cache, row, room)
        if part is None:
            break
        parts.append(part)
        row, room = part.stop, room - part.num_tokens
        if part.num_cached:
            break
    return before + parts


def _known(rows: Rows, cache: KVCache, row: int, ready: Collection[Prefix]) -> int:
    """Return how many tokens of an incomplete row are in the cache, including the tokens of its shared prefix.

    Args:
        ready: prefixes that this pass completes.
    """
    completion = rows.completions[row]
    prefix = cache.prefixes.of(completion)
    if prefix is None or not (prefix.is_complete or prefix in ready):
        return completion.num_cached
    return max(completion.num_cached, len(prefix))


def _take(length: int, room: int) -> int:
    """Return how many of ``length`` tokens to compute in a pass that has room for ``room`` tokens.

    Only a row that fits into no pass is divided: attention to a cached prefix is slower than one over a whole prompt.
    """
    if length <= room:
        return length
    return room if length > PASS_TOKENS and 2 * room >= PASS_TOKENS else 0


def together(parts: Sequence[Part]) -> Attend:
    """Return an ``Attend`` that applies the attention of each part to its own tokens of the pass."""
    if len(parts) == 1:
        return parts[0].attend
    sizes = [part.num_tokens for part in parts]

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        own = zip(parts, *(torch.split(x_THd, sizes) for x_THd in (q_THd, k_TKd, v_TKd)), strict=True)
        return torch.cat([part.attend(layer, q, k, v) for part, q, k, v in own])

    return attend


def computing(prefix: Prefix, cache: KVCache, row: int, room: int) -> Part | None:
    """Build the part that prefills the next tokens of a shared prefix, at most ``room`` tokens. It samples for no row;
    ``row`` is the first row that waits for the prefix.

    Returns None if the prefix has to wait for the next pass.
    """
    known = prefix.num_cached
    take = _take(len(prefix) - known, room)
    if not take:
        return None
    tokens = pack([prefix.token_ids[known : known + take]]).to(prefix.keys[0].device)
    position_T, stop = tokens.position_ids_T + known, known + take
    blocks = CausalBlocks.of(tokens)
    mask_1SL: Tensor | None = None
    if known:
        hidden_TL = torch.arange(stop, device=position_T.device) > position_T[:, None]
        mask_1SL = torch.zeros((1, *hidden_TL.shape), dtype=cache.dtype, device=position_T.device)
        mask_1SL.masked_fill_(hidden_TL, float("-inf"))

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        prefix.write(layer, known, k_TKd, v_TKd)
        if mask_1SL is None:
            return blocks.attend(q_THd, k_TKd, v_TKd)
        k_1KLd, v_1KLd = prefix.keys[layer][None, :, :stop], prefix.values[layer][None, :, :stop]
        return attend_more(q_THd[None], k_1KLd, v_1KLd, mask_1SL, lse=False)[0][0]

    none = position_T[:0]
    return Part(
        row, row, tokens.token_ids_T, position_T, none, none, none, none, attend, num_cached=stop, prefix=prefix
    )


def decoding(rows: Rows, cache: KVCache, groups: Sequence[Group]) -> Part:
    """Build the part of the fresh rows, of which the cache lacks only the last token.

    ``groups`` are those of the lengths after the prefixes.
    """
    stop = groups[-1].stop
    position_R = rows.length_R[:stop] - 1
    own_R = position_R - rows.shared_R[:stop]
    row_R = torch.arange(stop, device=position_R.device)
    place_R = cache.places(row_R, own_R)
    masks = _masks(own_R, groups, cache.dtype)
    prefixes = [cache.prefixes.of(completion) for completion in rows.completions[:stop]]
    queries = PrefixQueries.of(prefixes, np.ones(stop, dtype=np.int64), position_R.device)

    def attend(layer: int, q_RHd: Tensor, k_RKd: Tensor, v_RKd: Tensor) -> Tensor:
        cache.write(layer, place_R, k_RKd, v_RKd)
        own = [
            cache.attend(
                layer, group.start, q_RHd[group.start : group.stop], group.longest, mask, lse=queries is not None
            )
            for group, mask in zip(groups, masks, strict=True)
        ]
        out_RHd = own[0][0] if len(own) == 1 else torch.cat([out for out, _ in own])
        if queries is None:
            return out_RHd
        return queries.attend(layer, q_RHd, out_RHd, torch.cat([lse for _, lse in own if lse is not None]))

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


def prefilling(rows: Rows, cache: KVCache, start: int, room: int) -> Part | None:
    """Build a ``Part`` that begins at row ``start``, from rows without cached tokens.

    The part has at least one row, and as many as fit in ``room`` tokens. Identical sequences are computed once. Returns
    None if the first row has to wait for the next pass.
    """
    whole = tuple(rows.sequence(start))
    first = whole[: _take(len(whole), room)]
    if not first:
        return None
    divided = len(first) < len(whole)
    found: dict[tuple[int, ...], int] = {}
    owners: list[int] = []
    num_tokens = 0
    for row in range(start, rows.count):
        sequence = tuple(rows.sequence(row))
        if owners and (rows.completions[row].num_cached or cache.prefixes.of(rows.completions[row]) is not None):
            break
        if divided:
            if len(sequence) <= len(first) or sequence[: len(first)] != first:
                break
            sequence = first
        if sequence not in found:
            num_tokens += len(sequence)
            if owners and num_tokens > room:
                break
        owners.append(found.setdefault(sequence, len(found)))
    return _prefilled(rows, cache, start, list(found)[: max(owners) + 1], np.array(owners), divided=divided)


def _prefilled(
    rows: Rows, cache: KVCache, start: int, sequences: list[tuple[int, ...]], owner_R: NDArray[Any], *, divided: bool
) -> Part:
    """Build a ``Part`` that begins at row ``start``; row ``start + i`` has the tokens ``sequences[owner_R[i]]``.

    Args:
        divided: True if ``sequences`` has only the first tokens of the rows.
    """
    device = rows.length_R.device
    packed = pack(sequences)
    length_R = np.asarray(packed.lengths)[owner_R]
    first_R = packed.cu_seqlens_S1.numpy()[owner_R]
    position_W = _offsets(length_R)
    shared = len(packed.lengths) < len(owner_R)
    source_W = torch.from_numpy(np.repeat(first_R, length_R) + position_W).to(device) if shared else None
    tokens = packed.to(device)
    blocks = CausalBlocks.of(tokens)
    at_W = torch.from_numpy(np.repeat(np.arange(start, start + len(owner_R)), length_R)).to(device)
    offset_W = torch.from_numpy(position_W).to(device)
    place_W = cache.places(at_W, offset_W)

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        cache.write(layer, place_W, part.written(k_TKd), part.written(v_TKd))
        return blocks.attend(q_THd, k_TKd, v_TKd)

    last_R = torch.from_numpy(first_R + length_R - 1).to(device)
    part = Part(
        start, start + len(owner_R), tokens.token_ids_T, tokens.position_ids_T, last_R[:0] if divided else last_R,
        at_W, offset_W, source_W, attend, num_cached=len(sequences[0]) if divided else 0,
    )  # fmt: skip
    return part


def extending(rows: Rows, cache: KVCache, start: int, room: int, ready: Collection[Prefix] = ()) -> Part | None:
    """Build a ``Part`` that begins at row ``start``, from rows that each have a cached or shared prefix.

    The part has at least one row, and as many as fit in ``room`` tokens. If the next rows are identical to the first
    row, they are computed once and the part has no other rows. Returns None if the first row has to wait for the next
    pass.

    Args:
        ready: shared prefixes that the same pass completes.
    """
    known, prefix = _known(rows, cache, start, ready), cache.prefixes.of(rows.completions[start])
    whole = list(rows.sequence(start))
    take = _take(len(whole) - known, room)
    if not take:
        return None
    new, cached, prefixes, copies = [whole[known : known + take]], [known], [prefix], 1
    divided = known + take < len(whole)
    for row in range(start + 1, rows.count):
        known, sequence = _known(rows, cache, row, ready), list(rows.sequence(row))
        prefix = cache.prefixes.of(rows.completions[row])
        if len(new) == 1 and known == cached[0] and prefix is prefixes[0] and sequence == whole:
            copies += 1
            continue
        longest = max(len(sequence) - known, *map(len, new))
        if not known or divided or copies > 1 or longest * (len(new) + 1) > room:
            break
        new.append(sequence[known:])
        cached.append(known)
        prefixes.append(prefix)
    return _extended(rows, cache, start, new, np.array(cached), prefixes=prefixes, copies=copies, divided=divided)


def _extended(
    rows: Rows,
    cache: KVCache,
    start: int,
    new: list[list[int]],
    cached_R: NDArray[Any],
    *,
    prefixes: Sequence[Prefix | None],
    copies: int,
    divided: bool,
) -> Part:
    """Build a ``Part`` that begins at row ``start``; in each row, the tokens ``new`` follow ``cached_R`` cached tokens.

    Args:
        prefixes: the shared prefix of each row, whose tokens are among the cached ones.
        copies: number of identical rows; if there are several, ``new`` has the tokens of the first one alone.
        divided: True if the rows have further tokens after ``new``.
    """
    device, length_R = rows.length_R.device, np.array([len(tokens) for tokens in new])
    own_R = cached_R - np.array([0 if prefix is None else len(prefix) for prefix in prefixes])
    offset_T = _offsets(length_R)
    position_T = torch.from_numpy(np.repeat(cached_R, length_R) + offset_T).to(device)
    own_T = torch.from_numpy(np.repeat(own_R, length_R) + offset_T).to(device)
    row_T = torch.from_numpy(np.repeat(np.arange(len(new)), length_R)).to(device)
    row_W = start + torch.cat([row_T + copy for copy in range(copies)])
    source_W = torch.arange(len(position_T), device=device).repeat(copies) if copies > 1 else None
    place_W = cache.places(row_W, own_T.repeat(copies))
    num_new, length = int(length_R.max()), int((own_R + length_R).max())
    at = row_T, torch.from_numpy(offset_T).to(device)
    hidden_TL = torch.arange(length, device=device) > own_T[:, None]
    mask_RSL = torch.zeros((len(new), num_new, length), dtype=cache.dtype, device=device)
    mask_RSL[at] = mask_RSL[at].masked_fill(hidden_TL, float("-inf"))
    queries = PrefixQueries.of(prefixes, length_R, device)

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        cache.write(layer, place_W, part.written(k_TKd), part.written(v_TKd))
        q_RSHd = q_THd.new_zeros((len(new), num_new, *q_THd.shape[1:]))
        q_RSHd[at] = q_THd
        own = cache.read(layer, start, len(new), length)
        out_RSHd, lse_RSH = attend_more(q_RSHd, *own, mask_RSL, lse=queries is not None)
        if queries is None or lse_RSH is None:
            return out_RSHd[at]
        return queries.attend(layer, q_THd, out_RSHd[at], lse_RSH[at])

    token_T = torch.tensor([token for tokens in new for token in tokens], device=device)
    last_R = torch.from_numpy(np.cumsum(length_R) - 1).to(device).repeat(copies)
    part = Part(
        start, start + len(new) + copies - 1, token_T, position_T, last_R[:0] if divided else last_R,
        row_W, position_T.repeat(copies), source_W, attend,
        num_cached=int(cached_R[0] + length_R[0]) if divided else 0,
    )  # fmt: skip
    return part


def _offsets(length_R: NDArray[Any]) -> NDArray[Any]:
    """Return the positions 0, 1, ... within each row, concatenated: [sum of ``length_R``]."""
    ends_R = np.cumsum(length_R)
    offset_T: NDArray[Any] = np.arange(ends_R[-1]) - np.repeat(ends_R - length_R, length_R)
    return offset_T
