"""Attention with the log-sum-exp of its scores, so that attention to two sets of keys can be merged.

Shape legend: R = rows, K = key/value heads, Q = queries, L = positions, d = head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention", "attention_lse", "merged", "plain_attention_lse"]

MAX_SCORES = 1 << 26
"""Largest number of scores that ``plain_attention_lse`` has in memory at once."""


def attention(
    q_RKQd: Tensor, k_RKLd: Tensor, v_RKLd: Tensor, mask_R1QL: Tensor | None, *, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return ``softmax(q kᵀ / √d + mask) v``, [R, K, Q, d], and the log-sum-exp of the scores if ``lse`` is set."""
    if lse:
        return attention_lse(q_RKQd, k_RKLd, v_RKLd, mask_R1QL)
    return F.scaled_dot_product_attention(q_RKQd, k_RKLd, v_RKLd, attn_mask=mask_R1QL), None


def attention_lse(
    q_RKQd: Tensor, k_RKLd: Tensor, v_RKLd: Tensor, mask_R1QL: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention outputs [R, K, Q, d], and the log-sum-exp of the scores, float32 [R, K, Q].

    On a CPU it is the kernel that ``F.scaled_dot_product_attention`` uses there, which hides its second result. On
    other devices it is written in matrix products, because their kernels differ in what they accept.
    """
    if q_RKQd.device.type != "cpu":
        return plain_attention_lse(q_RKQd, k_RKLd, v_RKLd, mask_R1QL)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out_RKQd, lse_RKQ = kernel(q_RKQd, k_RKLd, v_RKLd, attn_mask=mask_R1QL)
    return out_RKQd, lse_RKQ


def plain_attention_lse(
    q_RKQd: Tensor, k_RKLd: Tensor, v_RKLd: Tensor, mask_R1QL: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same as ``attention_lse``, from matrix products with scores in float32."""
    (rows, heads, queries, width), length = q_RKQd.shape, k_RKLd.shape[2]
    some = max(1, MAX_SCORES // (rows * heads * length))
    if queries > some:
        masks = [None] * queries if mask_R1QL is None else torch.split(mask_R1QL.expand(-1, -1, queries, -1), some, 2)
        parts = zip(torch.split(q_RKQd, some, 2), masks, strict=False)
        found = [plain_attention_lse(q, k_RKLd, v_RKLd, mask) for q, mask in parts]
        return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2)
    scores_RKQL = q_RKQd.float() @ k_RKLd.float().transpose(2, 3) * width**-0.5
    if mask_R1QL is not None:
        scores_RKQL = scores_RKQL + mask_R1QL
    lse_RKQ = scores_RKQL.logsumexp(-1)
    return (scores_RKQL - lse_RKQ[..., None]).exp().to(v_RKLd.dtype) @ v_RKLd, lse_RKQ


def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Return the attention to both sets of keys, given outputs [..., d] and log-sum-exps [...] of each set.

    Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), section 3.
    """
    weight_b = torch.sigmoid(lse_b - lse_a)[..., None]
    return torch.lerp(out_a.float(), out_b.float(), weight_b.float()).to(out_a.dtype)
