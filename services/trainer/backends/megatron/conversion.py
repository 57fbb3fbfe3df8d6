"""Conversion between Hugging Face tensors and megatron-core parameters: pure functions of names and tensors.

Two independent steps, each with an exact inverse. *Cutting*: a tensor-parallel rank holds a contiguous run of rows or
columns of each Hugging Face tensor (whole heads, the same rows of gate and up); expert tensors are first divided by
expert over the expert-parallel ranks. *Fusing*: megatron-core keeps some of these runs in one parameter: query, key and
value by query group, gate above up. Optimizer moments have the shapes of their parameters and are converted the same
way.

Shape legend: n = rows of a piece on one rank, ... = the dimensions after the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.shared.errors import ConfigError

__all__ = ["EMBEDDING", "Parameter", "Piece", "cut", "dealt", "fuse", "joined", "mapping_of", "shape_on_rank", "split"]

EMBEDDING = "embedding.word_embeddings.weight"

_GLOBAL: dict[str, tuple[str, int | None]] = {
    "model.embed_tokens.weight": (EMBEDDING, 0),
    "model.norm.weight": ("decoder.final_layernorm.weight", None),
    "lm_head.weight": ("output_layer.weight", 0),
    "score.weight": ("value_head.weight", None),
}
_LAYER: dict[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attn.q_proj.weight": ("self_attention.linear_qkv.weight", 0),
    "self_attn.k_proj.weight": ("self_attention.linear_qkv.weight", 0),
    "self_attn.v_proj.weight": ("self_attention.linear_qkv.weight", 0),
    "self_attn.q_proj.bias": ("self_attention.linear_qkv.bias", 0),
    "self_attn.k_proj.bias": ("self_attention.linear_qkv.bias", 0),
    "self_attn.v_proj.bias": ("self_attention.linear_qkv.bias", 0),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight", None),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight", None),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", 1),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", None),
    "mlp.gate_proj.weight": ("mlp.linear_fc1.weight", 0),
    "mlp.up_proj.weight": ("mlp.linear_fc1.weight", 0),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight", 1),
    "mlp.gate.weight": ("mlp.router.weight", None),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_up_proj", 1),
    "mlp.experts.down_proj": ("mlp.experts.down_proj", 2),
}
_VOCABULARY = {EMBEDDING, "output_layer.weight"}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Piece:
    """Division of one Hugging Face tensor over ranks.

    Attributes:
        name: Hugging Face name.
        shape: shape of the whole tensor.
        dim: dimension along which the tensor-parallel ranks divide it; None: every rank holds the whole.
        halves: whether two tensors are stacked along ``dim``, so that a rank holds a part of each.
        dealt_to: number of expert-parallel ranks over which the first dimension, the experts, is divided.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    halves: bool = False
    dealt_to: int = 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """One megatron-core parameter and the Hugging Face tensors fused into it.

    Attributes:
        name: name in the megatron-core model.
        pieces: fused tensors, in order.
        groups: number of row groups on one rank in which the pieces are interleaved: query groups in attention, else 1.
        padded_rows: rows on one rank after padding to equal size (vocabulary); None: no padding.
        stage: pipeline stage that holds it. The last stage also keeps a copy of a tied embedding.
    """

    name: str
    pieces: tuple[Piece, ...]
    groups: int = 1
    padded_rows: int | None = None
    stage: int = 0

    @property
    def is_cut(self) -> bool:
        """Return True if each tensor-parallel rank holds a different part of this parameter."""
        return self.pieces[0].dim is not None

    @property
    def is_dealt(self) -> bool:
        """Return True if expert-parallel ranks hold different parts of this parameter."""
        return self.pieces[0].dealt_to > 1


def mapping_of(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    num_kv_heads: int,
    tensor_parallel: int,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
) -> list[Parameter]:
    """Return the megatron-core parameters of a Llama, Qwen or Mixtral model, from its Hugging Face names and shapes.

    Args:
        shapes: shapes of the whole tensors by name, tied ones once, in the model's order.

    Raises:
        ConfigError: a tensor has no counterpart in the megatron-core model, or cannot be divided into that many parts.
    """
    pieces: dict[str, list[Piece]] = {}
    for name, shape in shapes.items():
        target, dim = _place(name)
        ranks = expert_parallel if _EXPERTS in name else 1
        piece = Piece(name, shape, dim, halves=name.endswith(".gate_up_proj"), dealt_to=ranks)
        pieces.setdefault(target, []).append(piece)
    _check_cut(pieces, num_kv_heads=num_kv_heads, tensor_parallel=tensor_parallel)
    _check_experts(pieces, expert_parallel)
    stages = _stages(pieces, pipeline_parallel)
    parameters = []
    for name, parts in pieces.items():
        groups = num_kv_heads // tensor_parallel if ".linear_qkv." in name else 1
        padded = math.ceil(parts[0].shape[0] / tensor_parallel) if name in _VOCABULARY else None
        parameters.append(Parameter(name, tuple(parts), groups, padded, stages[name]))
    return parameters


def dealt(whole: Tensor, piece: Piece, *, rank: int) -> Tensor:
    """Return the experts of ``whole`` that expert-parallel rank ``rank`` holds; ``whole`` itself if it is no expert
    weight."""
    return whole.chunk(piece.dealt_to, 0)[rank] if piece.dealt_to > 1 else whole


def cut(whole: Tensor, piece: Piece, *, rank: int, size: int) -> Tensor:
    """Return the part of ``whole`` that tensor-parallel rank ``rank`` holds: a contiguous run of rows or columns. If
    ``whole`` stacks gate and up weights (``piece.halves``), the part has one run of each.

    ``size``: number of tensor-parallel ranks. The last ranks may hold less than the others.
    """
    if piece.dim is None:
        return whole
    halves = whole.chunk(2 if piece.halves else 1, piece.dim)
    length = halves[0].shape[piece.dim]
    per_rank = math.ceil(length / size)
    start = min(rank * per_rank, length)
    runs = [half.narrow(piece.dim, start, min(per_rank, length - start)) for half in halves]
    return torch.cat(runs, piece.dim) if piece.halves else runs[0]


def joined(parts: Sequence[Tensor], piece: Piece) -> Tensor:
    """Invert ``cut``: return the whole tensor from the parts of all ranks, in rank order."""
    if piece.dim is None:
        return parts[0]
    halves = zip(*(part.chunk(2 if piece.halves else 1, piece.dim) for part in parts), strict=True)
    return torch.cat([torch.cat(half, piece.dim) for half in halves], piece.dim)


def fuse(parts: Sequence[Tensor], parameter: Parameter) -> Tensor:
    """Join one rank's parts of Hugging Face tensors into one megatron-core parameter, which has the rows of all parts.
    Rows are interleaved by group: for example query, key and value of the first query group, then those of the second.
    Padding rows follow at the end; they are zero."""
    grouped = [torch.unflatten(part, 0, (parameter.groups, -1)) for part in parts]
    fused = torch.cat(grouped, 1).flatten(0, 1)
    missing = (parameter.padded_rows or len(fused)) - len(fused)
    return torch.cat((fused, fused.new_zeros(missing, *fused.shape[1:]))) if missing else fused


def split(fused: Tensor, parameter: Parameter, *, rank: int, size: int) -> list[Tensor]:
    """Invert ``fuse``: return this rank's part of each piece, without padding. If ``parameter.groups`` is 1, the parts
    are views."""
    rows = [_rows(piece, rank, size) for piece in parameter.pieces]
    grouped = torch.unflatten(fused.narrow(0, 0, sum(rows)), 0, (parameter.groups, -1))
    return [part.flatten(0, 1) for part in torch.split(grouped, [n // parameter.groups for n in rows], 1)]


def shape_on_rank(parameter: Parameter, *, size: int) -> tuple[int, ...]:
    """Return the shape of the fused parameter; the same on each of ``size`` tensor-parallel ranks."""
    first = parameter.pieces[0]
    rows = parameter.padded_rows or sum(_rows(piece, 0, size) for piece in parameter.pieces)
    return rows, *(n // size if dim == first.dim else n for dim, n in enumerate(first.shape) if dim)


def _rows(piece: Piece, rank: int, size: int) -> int:
    """Return the number of rows of the piece on ``rank``."""
    if piece.dim != 0:
        return piece.shape[0] // piece.dealt_to
    per_rank = math.ceil(piece.shape[0] / size)
    return max(0, min(per_rank, piece.shape[0] - rank * per_rank))


def _place(name: str) -> tuple[str, int | None]:
    match = _LAYER_NAME.fullmatch(name)
    if match is None and name in _GLOBAL:
        return _GLOBAL[name]
    if match is not None and match[2] in _LAYER:
        target, dim = _LAYER[match[2]]
        return f"decoder.layers.{match[1]}.{target}", dim
    raise ConfigError(
        f"backend 'megatron' has no place for the tensor '{name}': it trains Llama, Qwen and Mixtral models without "
        "biases other than those of query, key and value; use backend 'local' or 'fsdp'"
    )


def _check_cut(pieces: Mapping[str, list[Piece]], *, num_kv_heads: int, tensor_parallel: int) -> None:
    if num_kv_heads % tensor_parallel:
        raise ConfigError(
            f"backend.tensor_parallel {tensor_parallel} does not divide the {num_kv_heads} key/value heads of the "
            "model: every rank needs whole query groups"
        )
    for part in (part for parts in pieces.values() for part in parts):
        if ".mlp." not in part.name or part.dim is None:
            continue
        width = part.shape[part.dim] // (2 if part.halves else 1)
        if width % tensor_parallel:
            raise ConfigError(
                f"backend.tensor_parallel {tensor_parallel} does not divide the {width} columns of the model's MLP "
                f"('{part.name}')"
            )
    for name in _VOCABULARY & pieces.keys():
        (part,) = pieces[name]
        if not _rows(part, tensor_parallel - 1, tensor_parallel):
            raise ConfigError(f"a vocabulary of {part.shape[0]} is too small for tensor_parallel {tensor_parallel}")


def _check_experts(pieces: Mapping[str, list[Piece]], expert_parallel: int) -> None:
    numbers = {part.shape[0] for parts in pieces.values() for part in parts if _EXPERTS in part.name}
    if expert_parallel > 1 and not numbers:
        raise ConfigError(f"backend.expert_parallel {expert_parallel}: this model has no experts")
    for number in numbers:
        if number % expert_parallel:
            raise ConfigError(
                f"backend.expert_parallel {expert_parallel} does not divide the {number} experts of a layer"
            )


def _stages(pieces: Mapping[str, list[Piece]], pipeline_parallel: int) -> dict[str, int]:
    """Return each parameter's pipeline stage. Stages hold equal runs of layers; the embedding is on the first stage,
    all other parameters are on the last."""
    layers = {name: int(name.split(".")[2]) for name in pieces if name.startswith("decoder.layers.")}
    number = len(set(layers.values()))
    if number % pipeline_parallel:
        raise ConfigError(
            f"backend.pipeline_parallel {pipeline_parallel} does not divide the {number} layers of the model: every "
            "stage has as many"
        )
    per_stage = max(1, number // pipeline_parallel)
    ends = {EMBEDDING: 0}
    return {
        name: layers[name] // per_stage if name in layers else ends.get(name, pipeline_parallel - 1) for name in pieces
    }
