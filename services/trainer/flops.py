"""Floating-point operations of a decoder over unpadded tokens, for the model FLOPs utilisation (MFU).

Forward, with P weights in the matrices of the blocks, H in the head (D × vocabulary, tied or not; D for a critic) and
A = Σ over layers of heads × head dimension::

    2 P · tokens + 2 H · scored tokens + 2 A · Σ length²

A multiplication and an addition are two operations; causal attention needs half of ``4 A length²``. A training pass
counts three forwards (the backward pass costs two), or two if the weights are frozen under an adapter; the adapter's
own small matrices are left out. Recomputed activations are not counted. In a mixture of experts, only the share of the
experts that a token visits counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.services.trainer.backends.base import TensorLayout
from penstock.services.trainer.batch.packing import Microbatch

__all__ = ["ModelFlops", "Work"]

_HEADS = ("lm_head.weight", "score.weight")


@dataclass(slots=True)
class Work:
    """Amount of work for a model: packed tokens, scored tokens and the sum of squared sequence lengths."""

    tokens: int = 0
    scored: int = 0
    squares: int = 0

    def add(self, microbatch: Microbatch | None, *, passes: int = 1) -> None:
        """Add one microbatch ``passes`` times: 1 for a forward pass, 3 with the backward pass."""
        if microbatch is not None:
            self.tokens += passes * microbatch.tokens.num_tokens
            self.scored += passes * len(microbatch.select_M)
            self.squares += passes * sum(length * length for length in microbatch.tokens.lengths)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Sizes of a model that determine its floating-point operations."""

    block_weights: float
    head_weights: int
    attention_width: int

    @classmethod
    def of(cls, layout: TensorLayout, *, expert_share: float = 1.0) -> ModelFlops:
        """Derive the sizes from the shapes of the weights.

        Args:
            expert_share: fraction of the experts that a token visits.
        """
        blocks, head, embedding, attention = 0.0, 0, 0, 0
        for name, shape, _ in layout:
            size = math.prod(shape)
            if name in _HEADS:
                head = size
            elif "embed_tokens" in name:
                embedding = size
            elif len(shape) >= 2:
                blocks += size * (expert_share if ".experts." in name else 1.0)
                attention += shape[0] if name.endswith("q_proj.weight") else 0
        return cls(blocks, head or embedding, attention)

    def forward(self, work: Work) -> float:
        """Return the floating-point operations of a forward pass over ``work``."""
        return (
            2 * self.block_weights * work.tokens
            + 2 * self.head_weights * work.scored
            + 2 * self.attention_width * work.squares
        )
