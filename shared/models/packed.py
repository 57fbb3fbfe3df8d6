"""Ragged sequences as one flat row of tokens.

Shape legend: T = tokens of all sequences, S = sequences, S1 = S + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PackedTokens", "pack"]


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Concatenated sequences without padding. ``position_ids_T`` restarts at 0 with each sequence."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_S1: Tensor
    lengths: tuple[int, ...]
    max_seqlen: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return int(self.token_ids_T.shape[0])

    def to(self, device: torch.device | str) -> PackedTokens:
        """Copy the tokens to ``device``."""
        return PackedTokens(
            self.token_ids_T.to(device),
            self.position_ids_T.to(device),
            self.cu_seqlens_S1.to(device),
            self.lengths,
            self.max_seqlen,
        )

    def blocks(self, max_tokens: int) -> tuple[list[PackedTokens], Tensor]:
        """Split into blocks of sequences of similar length, shortest first.

        A block may exceed ``max_tokens`` tokens, but by less than the length of its first sequence.

        Returns:
            The blocks, and ``place_T``: the index of each token of this row in the concatenation of the blocks.
        """
        order = np.argsort(self.lengths, kind="stable")
        lengths = np.asarray(self.lengths, np.int64)[order]
        ends = np.cumsum(lengths)
        places = np.empty(len(order), np.int64)
        places[order] = ends - lengths
        starts_S = torch.from_numpy(places).to(self.token_ids_T.device)
        place_T = torch.repeat_interleave(starts_S, self.cu_seqlens_S1.diff()) + self.position_ids_T
        source_T = torch.empty_like(place_T)
        source_T[place_T] = torch.arange(self.num_tokens, device=place_T.device)
        num_blocks = -(-self.num_tokens // max_tokens)
        edges = np.searchsorted(ends, np.arange(1, num_blocks) * (self.num_tokens / num_blocks), side="right")
        cuts = sorted({0, *edges.tolist(), len(order)})
        return [self._block(lengths[a:b], source_T, int(ends[a] - lengths[a])) for a, b in pairwise(cuts)], place_T

    def _block(self, lengths: NDArray[np.int64], source_T: Tensor, start: int) -> PackedTokens:
        tokens_of_block = source_T[start : start + int(lengths.sum())]
        cu_seqlens = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
        return PackedTokens(
            token_ids_T=self.token_ids_T[tokens_of_block],
            position_ids_T=self.position_ids_T[tokens_of_block],
            cu_seqlens_S1=cu_seqlens.to(self.cu_seqlens_S1.device),
            lengths=tuple(lengths.tolist()),
            max_seqlen=int(lengths.max()),
        )


def pack(sequences: Sequence[Sequence[int] | NDArray[Any]]) -> PackedTokens:
    """Concatenate token sequences.

    Args:
        sequences: S sequences of token ids; each has at least one token.

    Raises:
        ValueError: there is no sequence, or one is empty.
    """
    lengths = np.fromiter((len(s) for s in sequences), np.int64, len(sequences))
    if not len(lengths) or not lengths.all():
        raise ValueError("pack needs at least one sequence, and no empty ones")
    cu_seqlens = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    return PackedTokens(
        token_ids_T=torch.from_numpy(np.concatenate([np.asarray(s, np.int64) for s in sequences])),
        position_ids_T=torch.from_numpy(np.arange(total) - np.repeat(cu_seqlens[:-1], lengths)),
        cu_seqlens_S1=torch.from_numpy(cu_seqlens),
        lengths=tuple(lengths.tolist()),
        max_seqlen=int(lengths.max()),
    )
