"""Packing: groups become columns, and columns become microbatches of packed sequences.

Packing is a pure function of the groups in manifest order and the configuration, so a replay packs the same tokens at
the same positions. The work per trajectory is a few array operations, never a loop over tokens.

Shape legend: B = valid trajectories (neither failed nor greedy), G = groups, T = packed tokens, M = scored tokens,
S1 = sequences + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.shared.errors import ProtocolError
from penstock.shared.models.packed import PackedTokens
from penstock.shared.protocol.trajectory import FINISH_REASONS, Group

__all__ = [
    "Columns",
    "Microbatch",
    "columns_of",
    "columns_of_rows",
    "concatenated_ranges",
    "microbatches",
    "pair_microbatches",
    "stand_in",
]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Valid trajectories of some groups, one row each, with their tokens in two flat arrays.

    Attributes:
        group_B: index of the group in the order given.
        rewards_B: float32.
        parts: float32 [B] by reward component; NaN if a group has no such component.
        baseline_G: float32, reward of the group's greedy completion; NaN without one.
        truncated_B: bool, cut off by the token limit.
        prompt_start_B, prompt_length_B: range of the prompt in ``tokens``.
        start_B, length_B: range of the completion in ``logprobs`` and ``mask``; in ``tokens``, the range begins at
            ``start_B + offset``.
        offset: index in ``tokens`` of the first completion; prompts come first.
        tokens: int64, all prompts, then all completions (also of invalid trajectories, to which no row points).
        logprobs, mask: behaviour log-prob of each completion token, and True if the policy chose the token.
        scored_B: number of tokens with mask True.
        num_groups: number of groups.
        num_failed: number of failed trajectories.
        assumed_B: bool, True if the sampler is unknown, so that the log-probs are meaningless.
        temperature_B: float32, sampling temperature; log-probs are of logits / temperature.
        versions: int64, policy version that chose each completion token; empty for supervised rows.
        experts: router table to replay, one row for each of ``tokens``; None without one.
    """

    group_B: Ints
    rewards_B: NDArray[np.float32]
    parts: dict[str, NDArray[np.float32]]
    baseline_G: NDArray[np.float32]
    truncated_B: NDArray[np.bool_]
    prompt_start_B: Ints
    prompt_length_B: Ints
    start_B: Ints
    length_B: Ints
    offset: int
    tokens: Ints
    logprobs: NDArray[np.float32]
    mask: NDArray[np.bool_]
    scored_B: Ints
    num_groups: int
    num_failed: int
    assumed_B: NDArray[np.bool_]
    temperature_B: NDArray[np.float32]
    versions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    experts: NDArray[Any] | None = None

    def counted(self) -> Ints:
        """Return the indices in ``logprobs`` of all scored tokens, row after row."""
        places = concatenated_ranges(self.start_B, self.length_B)
        return places[self.mask[places]]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Input of one forward and backward pass.

    Attributes:
        tokens: sequences of prompt and completion, each without its last token, which precedes no token to score.
        select_M: position in ``tokens`` whose logits score the token; ``targets_M``: id of the token.
        rows_M: row of the token's trajectory in this rank's columns.
        behaviour_M: behaviour log-probs, float32.
        lengths_M: number of scored tokens of the token's trajectory, float32.
        source_M: index of the token in the columns' ``logprobs`` and ``mask``.
        experts_TNK: experts of each packed token in each expert layer, to be replayed; None: the routers decide.
        temperature_M: float32, temperature of the token's trajectory; None if all are 1.
    """

    tokens: PackedTokens
    select_M: Tensor
    targets_M: Tensor
    rows_M: Tensor
    behaviour_M: Tensor
    lengths_M: Tensor
    source_M: Tensor
    experts_TNK: Tensor | None = None
    temperature_M: Tensor | None = None

    @property
    def temperature(self) -> float | Tensor:
        """One temperature for all tokens, or the temperature of each token, [M]."""
        return 1.0 if self.temperature_M is None else self.temperature_M

    def to(self, device: torch.device) -> Microbatch:
        """Return the microbatch on ``device``."""
        return Microbatch(
            self.tokens.to(device),
            self.select_M.to(device),
            self.targets_M.to(device),
            self.rows_M.to(device),
            self.behaviour_M.to(device),
            self.lengths_M.to(device),
            self.source_M.to(device),
            None if self.experts_TNK is None else self.experts_TNK.to(device),
            None if self.temperature_M is None else self.temperature_M.to(device),
        )


def columns_of(groups: Sequence[Group]) -> Columns:
    """Return the columns of ``groups``, which may be empty.

    Raises:
        ProtocolError: a group has no prompt token, so that its first completion token has no distribution; a group was
            sampled at temperature 0, which has none either; or router tables are missing in some groups or differ in
            shape.
    """
    for group in groups:
        if group.temperature <= 0 and group.num_trajectories:
            raise ProtocolError(f"group {group.draw} of job '{group.job}' has temperature 0: it cannot be trained")
        if not len(group.prompt_ids):
            raise ProtocolError(f"group {group.draw} of job '{group.job}' has an empty prompt: it cannot be scored")
    sizes = np.array([g.num_trajectories for g in groups], np.int64)
    prompt_lengths = np.array([len(g.prompt_ids) for g in groups], np.int64)
    lengths = _joined([np.diff(g.cu_seqlens) for g in groups], np.int64)
    mask = _joined([g.mask for g in groups], np.uint8) != 0
    starts = _starts(lengths)
    failed, greedy = (_joined([getattr(g, name) for g in groups], np.bool_) for name in ("failed", "greedy"))
    keep = ~(failed | greedy)
    group_B = np.repeat(np.arange(len(groups)), sizes)[keep]
    scored_before = np.concatenate([[0], np.cumsum(mask)])
    finish = _joined([g.finish for g in groups], np.uint8)
    return Columns(
        group_B=group_B,
        rewards_B=_joined([g.rewards for g in groups], np.float32)[keep],
        parts={name: _part(groups, name)[keep] for name in sorted({name for g in groups for name in g.parts})},
        baseline_G=np.array([np.nan if g.baseline is None else g.baseline for g in groups], np.float32),
        truncated_B=(finish == FINISH_REASONS.index("length"))[keep],
        prompt_start_B=_starts(prompt_lengths)[group_B],
        prompt_length_B=prompt_lengths[group_B],
        start_B=starts[keep],
        length_B=lengths[keep],
        offset=int(prompt_lengths.sum()),
        tokens=_joined([*(g.prompt_ids for g in groups), *(g.token_ids for g in groups)], np.int64),
        logprobs=_joined([g.logprobs for g in groups], np.float32),
        mask=mask,
        scored_B=(scored_before[starts + lengths] - scored_before[starts])[keep],
        num_groups=len(groups),
        num_failed=int((failed & ~greedy).sum()),
        assumed_B=np.repeat(np.array([g.assumed for g in groups], np.bool_), sizes)[keep],
        temperature_B=np.repeat(np.array([g.temperature for g in groups], np.float32), sizes)[keep],
        versions=_joined([_versions(g.spans) for g in groups], np.int64),
        experts=_router_table(groups),
    )


def _versions(spans: NDArray[np.int32]) -> Ints:
    """Return the version of each token of a group; its spans are [trajectory, version, start, end]."""
    ordered = spans[np.lexsort((spans[:, 2], spans[:, 0]))].astype(np.int64)
    return np.repeat(ordered[:, 1], ordered[:, 3] - ordered[:, 2])


def columns_of_rows(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], masks: Sequence[Sequence[int]] | None = None
) -> Columns:
    """Return columns of supervised rows ``(prompt ids, answer ids)``: each its own group, no reward, temperature 1.

    Args:
        masks: for each row, 1 for each scored token of its answer; default: all are scored.

    Raises:
        ProtocolError: a prompt is empty.
    """
    if not all(len(prompt) for prompt, _ in rows):
        raise ProtocolError("a supervised row has an empty prompt: its first answer token cannot be scored")
    prompt_lengths = np.array([len(prompt) for prompt, _ in rows], np.int64)
    lengths = np.array([len(answer) for _, answer in rows], np.int64)
    offset, total = int(prompt_lengths.sum()), int(lengths.sum())
    mask = np.ones(total, np.bool_) if masks is None else np.array([m for row in masks for m in row], np.bool_)
    scored = lengths if masks is None else np.array([sum(row) for row in masks], np.int64)
    prompts = [token for prompt, _ in rows for token in prompt]
    return Columns(
        group_B=np.arange(len(rows)),
        rewards_B=np.zeros(len(rows), np.float32),
        parts={},
        baseline_G=np.full(len(rows), np.nan, np.float32),
        truncated_B=np.zeros(len(rows), np.bool_),
        prompt_start_B=_starts(prompt_lengths),
        prompt_length_B=prompt_lengths,
        start_B=_starts(lengths),
        length_B=lengths,
        offset=offset,
        tokens=np.array(prompts + [token for _, answer in rows for token in answer], np.int64),
        logprobs=np.zeros(total, np.float32),
        mask=mask,
        scored_B=scored,
        num_groups=len(rows),
        num_failed=0,
        assumed_B=np.zeros(len(rows), np.bool_),
        temperature_B=np.ones(len(rows), np.float32),
    )


def microbatches(columns: Columns, rows: Ints, max_tokens: int) -> list[Microbatch]:
    """Pack ``rows``, longest first, into few and nearly equal microbatches of at most ``max_tokens`` (next-fit).

    Sequences of similar length are packed together, because attention works on padded blocks. A sequence longer than
    ``max_tokens`` is never split; it gets its own microbatch. Rows without a scored token are left out.
    """
    rows = rows[columns.scored_B[rows] > 0]
    packed = columns.prompt_length_B[rows] + columns.length_B[rows] - 1
    return [_pack(columns, rows[places]) for places in _next_fit(packed, max_tokens)]


def pair_microbatches(columns: Columns, pairs_P2: Ints, max_tokens: int) -> list[Microbatch]:
    """Pack pairs of rows, int64 [P, 2], as ``microbatches`` does; the two rows of a pair stay adjacent.

    A pair with a row without scored tokens is left out.
    """
    pairs_P2 = pairs_P2[(columns.scored_B[pairs_P2] > 0).all(1)]
    packed = (columns.prompt_length_B[pairs_P2] + columns.length_B[pairs_P2] - 1).sum(1)
    return [_pack(columns, pairs_P2[places].ravel()) for places in _next_fit(packed, max_tokens)]


def _next_fit(packed: Ints, max_tokens: int) -> list[Ints]:
    """Divide items, longest first, into packs of at most ``max_tokens`` tokens. ``packed`` has the length of each item
    in tokens. Return the indices of the items in each pack.

    An item longer than ``max_tokens`` is alone in its pack.
    """
    order = np.argsort(-packed, kind="stable")
    packed = packed[order]
    target = packed.sum() / max(1, -(-packed.sum() // max_tokens))
    found, start, total = [], 0, 0
    for i, length in enumerate(packed.tolist()):
        if total and (total >= target or total + length > max_tokens):
            found.append(order[start:i])
            start, total = i, 0
        total += length
    if total:
        found.append(order[start:])
    return found


def _pack(columns: Columns, rows: Ints) -> Microbatch:
    prompt, completion = columns.prompt_length_B[rows], columns.length_B[rows]
    lengths = prompt + completion - 1
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    total = int(cu_seqlens[-1])
    segment_starts = np.stack([columns.prompt_start_B[rows], columns.start_B[rows] + columns.offset], 1).ravel()
    segment_lengths = np.stack([prompt, completion - 1], 1).ravel()
    packed = concatenated_ranges(segment_starts, segment_lengths)
    tokens = PackedTokens(
        token_ids_T=torch.from_numpy(columns.tokens[packed]),
        position_ids_T=torch.from_numpy(np.arange(total) - np.repeat(cu_seqlens[:-1], lengths)),
        cu_seqlens_S1=torch.from_numpy(cu_seqlens),
        lengths=tuple(lengths.tolist()),
        max_seqlen=int(lengths.max()),
    )
    source = concatenated_ranges(columns.start_B[rows], completion)
    place = concatenated_ranges(cu_seqlens[:-1] + prompt - 1, completion)
    row = np.repeat(rows, completion)
    chosen = columns.mask[source]
    if not chosen.all():
        source, place, row = source[chosen], place[chosen], row[chosen]
    temperature = columns.temperature_B[row]
    return Microbatch(
        tokens=tokens,
        select_M=torch.from_numpy(place),
        targets_M=torch.from_numpy(columns.tokens[source + columns.offset]),
        rows_M=torch.from_numpy(row),
        behaviour_M=torch.from_numpy(columns.logprobs[source]),
        lengths_M=torch.from_numpy(columns.scored_B[row].astype(np.float32)),
        source_M=torch.from_numpy(source),
        experts_TNK=None if columns.experts is None else torch.from_numpy(columns.experts[packed]),
        temperature_M=None if (temperature == 1).all() else torch.from_numpy(temperature),
    )


def concatenated_ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenation of ``arange(start, start + length)`` over all pairs of start and length."""
    shift = np.repeat(starts - _starts(lengths), lengths)
    return np.arange(len(shift)) + shift


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _router_table(groups: Sequence[Group]) -> NDArray[Any] | None:
    """Return the router tables in the order of ``Columns.tokens``: uint8 if the first table is, else int32.

    None if no group has a table.
    """
    tables = [g.experts for g in groups if g.experts is not None]
    if not tables:
        return None
    shapes = {table.shape[1:] for table in tables}
    if len(shapes) > 1 or any(g.experts is None and not (g.failed | g.greedy).all() for g in groups):
        raise ProtocolError(f"router tables of some groups are missing or of different models: {sorted(shapes)}")
    width = tables[0].dtype if tables[0].dtype == np.uint8 else np.dtype(np.int32)
    empty = [np.zeros((len(g.prompt_ids) + len(g.token_ids), *tables[0].shape[1:]), width) for g in groups]
    filled = [none if g.experts is None else g.experts for g, none in zip(groups, empty, strict=True)]
    prompts = [table[: len(g.prompt_ids)] for g, table in zip(groups, filled, strict=True)]
    completions = [table[len(g.prompt_ids) :] for g, table in zip(groups, filled, strict=True)]
    return np.concatenate([*prompts, *completions]).astype(width, copy=False)


def _part(groups: Sequence[Group], name: str) -> NDArray[np.float32]:
    absent = (np.full(g.num_trajectories, np.nan, np.float32) for g in groups)
    return np.concatenate([g.parts.get(name, nan) for g, nan in zip(groups, absent, strict=True)])


def stand_in() -> Microbatch:
    """Return a dummy microbatch of one token, with which a rank without a further microbatch joins the passes of other
    ranks."""
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float32)
    tokens = PackedTokens(zero, zero, torch.tensor([0, 1]), (1,), 1)
    return Microbatch(
        tokens=tokens, select_M=zero, targets_M=zero, rows_M=zero, source_M=zero, behaviour_M=one, lengths_M=one
    )
