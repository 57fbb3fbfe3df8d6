"""Causal attention over packed sequences, through padded blocks.

Padding is at the right, so the causal mask alone separates it from real tokens: no mask tensor is needed. Outputs of
padded queries are dropped when the blocks are flattened again.

Shape legend: T = tokens, H = query heads, K = key/value heads, d = head width, S = sequences, L = longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.shared.models.packed import PackedTokens

__all__ = ["CausalBlocks", "rotate"]


def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Apply the rotary position embedding (arXiv 2104.09864, eq. 34) to ``x_THd``, in Llama's halves convention."""
    first, second = x_THd.chunk(2, -1)
    return x_THd * cos_T1d + torch.cat((-second, first), -1) * sin_T1d


@dataclass(frozen=True, slots=True)
class CausalBlocks:
    """Index maps between flat tokens and one padded block [S, L]."""

    num_sequences: int
    length: int
    pad_SL: Tensor | None
    """Flat index of each position of the block; None if all sequences have the same length."""
    place_T: Tensor | None
    """Position of each token in the flattened block; None if ``pad_SL`` is None."""

    @classmethod
    def of(cls, tokens: PackedTokens) -> CausalBlocks:
        """Build the index maps of ``tokens``."""
        num_sequences, length = len(tokens.lengths), tokens.max_seqlen
        if num_sequences * length == tokens.num_tokens:
            return cls(num_sequences, length, None, None)
        device, lengths = tokens.token_ids_T.device, tokens.cu_seqlens_S1.diff()
        starts_T = torch.repeat_interleave(torch.arange(num_sequences, device=device) * length, lengths)
        place_T = starts_T + tokens.position_ids_T
        pad_SL = torch.zeros(num_sequences * length, dtype=torch.long, device=device)
        pad_SL[place_T] = torch.arange(tokens.num_tokens, device=device)
        return cls(num_sequences, length, pad_SL, place_T)

    def attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Return ``softmax(q kᵀ / √d) v`` within each sequence, over keys at or before the query, [T, H, d]."""
        q, k, v = self._pad(q_THd), self._pad(k_TKd), self._pad(v_TKd)
        out_SHLd = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out = out_SHLd.transpose(1, 2).reshape(-1, *q_THd.shape[1:])
        return out if self.place_T is None else out.index_select(0, self.place_T)

    def _pad(self, x_THd: Tensor) -> Tensor:
        padded = x_THd if self.pad_SL is None else x_THd.index_select(0, self.pad_SL)
        return padded.view(self.num_sequences, self.length, *x_THd.shape[1:]).transpose(1, 2)
