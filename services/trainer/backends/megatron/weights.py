"""Whole Hugging Face tensors from the parts on the ranks, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.backends.megatron.conversion import Parameter, cut, fuse, joined, split
from penstock.services.trainer.backends.megatron.groups import Groups

__all__ = ["gathered", "load", "whole_shapes"]


def gathered(
    own: Mapping[str, Tensor], mapping: Sequence[Parameter], order: Sequence[str], groups: Groups
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by Hugging Face name in ``order``, one parameter at a time. A collective on every rank.

    Args:
        own: this rank's parts, by megatron-core name.
        order: all Hugging Face names.
    """
    home = {piece.name: parameter for parameter in mapping for piece in parameter.pieces}
    ready: dict[str, Tensor] = {}
    for name in order:
        if name not in ready:
            ready |= _whole(own[home[name].name].detach(), home[name], groups)
        yield name, ready.pop(name)


def load(own: Mapping[str, Tensor], whole: Mapping[str, Tensor], mapping: Sequence[Parameter], groups: Groups) -> None:
    """Copy this rank's part of ``whole`` (by Hugging Face name) into ``own`` (by megatron-core name).

    Pieces that ``whole`` does not name stay as they are.
    """
    rank, size = groups.in_tensor()
    with torch.no_grad():
        for parameter in mapping:
            named = {i: whole[piece.name] for i, piece in enumerate(parameter.pieces) if piece.name in whole}
            target = own[parameter.name]
            if not target.ndim and named:
                target.copy_(named[0])
            elif named:
                parts = split(target.clone(), parameter, rank=rank, size=size)
                for index, tensor in named.items():
                    parts[index] = cut(tensor, parameter.pieces[index], rank=rank, size=size).to(target)
                target.copy_(fuse(parts, parameter))


def whole_shapes(own: Mapping[str, Tensor], mapping: Sequence[Parameter]) -> dict[str, Tensor]:
    """Empty tensors by Hugging Face name with the shapes and types that ``load`` expects."""
    return {
        piece.name: torch.empty(
            piece.shape if own[parameter.name].ndim else (), dtype=own[parameter.name].dtype, device="meta"
        )
        for parameter in mapping
        for piece in parameter.pieces
    }


def _whole(own: Tensor, parameter: Parameter, groups: Groups) -> dict[str, Tensor]:
    names = [piece.name for piece in parameter.pieces]
    if not own.ndim:
        return dict.fromkeys(names, own)
    rank, size = groups.in_tensor()
    if not parameter.is_cut or size == 1:
        return dict(zip(names, split(own, parameter, rank=rank, size=size), strict=True))
    shards = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(shards, own.contiguous(), group=groups.tensor)
    parts = [split(shard, parameter, rank=other, size=size) for other, shard in enumerate(shards)]
    columns = zip(*parts, strict=True)
    return {piece.name: joined(column, piece) for piece, column in zip(parameter.pieces, columns, strict=True)}
