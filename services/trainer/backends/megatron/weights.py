"""Gathering of whole Hugging Face tensors from the parts of all ranks, and loading of whole tensors into the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.backends.megatron.conversion import (
    Parameter,
    cut,
    dealt,
    fuse,
    joined,
    shape_on_rank,
    split,
)
from penstock.services.trainer.backends.megatron.groups import Groups

__all__ = ["gathered", "load", "whole_shapes"]


def gathered(
    own: Mapping[str, Tensor], mapping: Sequence[Parameter], order: Sequence[str], groups: Groups
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by Hugging Face name in ``order``, one parameter at a time. A collective on every rank.

    Args:
        own: this rank's parts by megatron-core name.
        order: all Hugging Face names.
    """
    home = {piece.name: parameter for parameter in mapping for piece in parameter.pieces}
    ready: dict[str, Tensor] = {}
    for name in order:
        if name not in ready:
            ready |= _whole(_of_its_stage(own, home[name], groups), home[name], groups)
        yield name, ready.pop(name)


def load(own: Mapping[str, Tensor], whole: Mapping[str, Tensor], mapping: Sequence[Parameter], groups: Groups) -> None:
    """Copy this rank's part of ``whole`` (by Hugging Face name) into ``own`` (by megatron-core name).

    Pieces that ``whole`` does not name, and parameters of other stages, stay as they are.
    """
    rank, size = groups.in_tensor()
    with torch.no_grad():
        for parameter in (parameter for parameter in mapping if parameter.name in own):
            named = {i: whole[piece.name] for i, piece in enumerate(parameter.pieces) if piece.name in whole}
            target = own[parameter.name]
            if not target.ndim and named:
                target.copy_(named[0])
            elif named:
                parts = split(target.clone(), parameter, rank=rank, size=size)
                for index, tensor in named.items():
                    piece = parameter.pieces[index]
                    mine = dealt(tensor, piece, rank=groups.experts.rank())
                    parts[index] = cut(mine, piece, rank=rank, size=size).to(target)
                target.copy_(fuse(parts, parameter))


def whole_shapes(own: Mapping[str, Tensor], mapping: Sequence[Parameter]) -> dict[str, Tensor]:
    """Return meta tensors by Hugging Face name with the shapes and types that ``load`` expects, for all stages."""
    like = _like(own)
    return {
        piece.name: torch.empty(piece.shape if like.ndim else (), dtype=like.dtype, device="meta")
        for parameter in mapping
        for piece in parameter.pieces
    }


def _like(own: Mapping[str, Tensor]) -> Tensor:
    """Return any tensor of ``own``, as a template for tensors that this rank does not hold. All tensors of ``own`` have
    the same type, and either all or none of them are scalars (step counts)."""
    return next(iter(own.values()))


def _of_its_stage(own: Mapping[str, Tensor], parameter: Parameter, groups: Groups) -> Tensor:
    """Return this tensor-parallel rank's part of the parameter, broadcast from the stage that holds it."""
    stage, stages = groups.in_pipeline()
    if stages == 1 or stage == parameter.stage:
        held = own[parameter.name].detach()
    else:
        like = _like(own)
        held = like.new_empty(shape_on_rank(parameter, size=groups.tensor.size()) if like.ndim else ())
    return groups.from_stage(held, parameter.stage)


def _whole(own: Tensor, parameter: Parameter, groups: Groups) -> dict[str, Tensor]:
    names = [piece.name for piece in parameter.pieces]
    if not own.ndim:
        return dict.fromkeys(names, own)
    size = groups.tensor.size()
    shards = _all(own, groups.tensor) if parameter.is_cut else [own]
    parts = [split(shard, parameter, rank=rank, size=size) for rank, shard in enumerate(shards)]
    wholes = [joined(column, piece) for piece, column in zip(parameter.pieces, zip(*parts, strict=True), strict=True)]
    if parameter.is_dealt:
        wholes = [torch.cat(_all(tensor, groups.experts)) for tensor in wholes]
    return dict(zip(names, wholes, strict=True))


def _all(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks of ``group``, in rank order."""
    if group.size() == 1:
        return [own]
    shards = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, own.contiguous(), group=group)
    return shards
