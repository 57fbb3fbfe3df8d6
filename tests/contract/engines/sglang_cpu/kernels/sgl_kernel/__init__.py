"""Stub of SGLang's compiled kernels, whose wheels need a GPU: the operations that a small dense model needs on a CPU.

They are plain torch: slow, and for contract tests only, not for users. Every other kernel can be imported and raises
an error when it is called. ``convert_weight_packed`` is missing on purpose: SGLang then uses its own torch code for
linear layers, norms, activations and rotary embeddings, with or without AMX.
"""

from __future__ import annotations

from typing import Any

import torch
from absent import absent, absent_modules
from torch import Tensor

absent_modules(__name__, "speculative", "flash_attn", "quantization", "scalar_type", "utils", "mamba", "elementwise")

_MASK = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, *_: int
) -> None:
    """Write the cache locations of each request into its row, one request after the other."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def _mix(hashed: Tensor, block: Tensor) -> Tensor:
    """Return 32-bit hash states, kept in int64, after one more block of 32 bits (MurmurHash 3)."""
    block = (block * 0xCC9E2D51) & _MASK
    block = ((block << 15) | (block >> 17)) & _MASK
    block = (block * 0x1B873593) & _MASK
    hashed = hashed ^ block
    hashed = ((hashed << 13) | (hashed >> 19)) & _MASK
    return (hashed * 5 + 0xE6546B64) & _MASK


_operations = torch.library.Library("sgl_kernel", "DEF")
_operations.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Return a hash [N, M] of each pair of (seed, position) and column, as SGLang's Triton kernel does."""
    seed, positions, columns = seed.to(torch.int64), positions.to(torch.int64), col_indices.to(torch.int64)
    hashed = _mix(torch.zeros_like(seed), seed & _MASK)
    hashed = _mix(hashed, (seed >> 32) & _MASK)
    hashed = _mix(hashed, positions & _MASK)
    hashed = _mix(hashed[:, None], columns[None] & _MASK) ^ 16
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _MASK
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _MASK
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


_operations.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"{__name__}.{name}")
