"""Attention inside the megatron-core model: rotation and causal attention over packed sequences.

megatron-core's own attention for packed sequences needs TransformerEngine. This module replaces it as the core
attention of the layer specification. Heads are already sharded over the tensor-parallel ranks. Context-parallel ranks
exchange tokens for heads before attention and back after it (DeepSpeed-Ulysses, arXiv 2309.14509), so that each rank
attends over whole sequences with part of its heads.

Shape legend: T = tokens of the microbatch, P = T with padding, C = context-parallel ranks, H = heads on this
tensor-parallel rank, d = head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.services.trainer.backends.megatron.core import PackedSeqParams, mappings
from penstock.shared.models.attention import CausalBlocks, rotate

__all__ = ["PackedCausalAttention", "PackedSequences"]


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Attention inputs of one microbatch; passed through megatron-core's layers as its ``packed_seq_params``."""

    blocks: CausalBlocks | None = None
    rope: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [T, 1, d] of each token's position."""
    num_tokens: int = 0
    """Number of tokens of the microbatch, T; later rows of the input are padding."""


class PackedCausalAttention(nn.Module):
    """Attention module for the slot ``core_attention`` of megatron-core's layer specification."""

    def __init__(self, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self._context = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Return the attention outputs of this context-parallel rank's tokens, [P / C, H, d] (P: tokens with padding,
        C: context-parallel ranks). The query has this shape too; key and value may have fewer heads."""
        sequences, length = packed_seq_params, packed_seq_params.num_tokens
        assert sequences.blocks is not None and sequences.rope is not None
        q, k, v = (self._tokens_for_heads(x)[:length] for x in (query, key, value))
        out = sequences.blocks.attend(rotate(q, *sequences.rope), rotate(k, *sequences.rope), v)
        padding = len(query) * self._context.size() - length
        return self._heads_for_tokens(F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out)

    def _tokens_for_heads(self, x: Tensor) -> Tensor:
        """Exchange this rank's tokens of all heads, [P / C, H, d], for all tokens of its heads, [P, H / C, d]."""
        ranks = self._context.size()
        if ranks == 1:
            return x
        by_rank = torch.unflatten(x, 1, (ranks, -1)).transpose(0, 1).contiguous()
        exchanged: Tensor = mappings.all_to_all(self._context, by_rank)
        return exchanged.flatten(0, 1)

    def _heads_for_tokens(self, x: Tensor) -> Tensor:
        """Turn all tokens of this rank's heads, [P, H / C, d], into this rank's tokens of all heads, [P / C, H, d].

        The context-parallel ranks exchange them in one all-to-all.
        """
        ranks = self._context.size()
        if ranks == 1:
            return x
        exchanged: Tensor = mappings.all_to_all(self._context, torch.unflatten(x, 0, (ranks, -1)).contiguous())
        return exchanged.transpose(0, 1).flatten(1, 2)
