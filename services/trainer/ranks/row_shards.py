"""Tensors sharded by rows over the ranks of a mesh: DTensors with placement ``Shard(0)``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

__all__ = ["as_sharded", "gathered", "is_sharded", "local_part", "own_rows", "rows_of_mesh"]


def own_rows(num_rows: int, rank: int, ranks: int) -> slice:
    """Return the rows that ``rank`` holds. Each rank holds the same number, rounded up; the last ranks may hold fewer
    or none."""
    most = -(-num_rows // ranks)
    start = min(rank * most, num_rows)
    return slice(start, min(start + most, num_rows))


def rows_of_mesh(num_rows: int, mesh: DeviceMesh) -> slice:
    """Return the rows that this rank of a one-dimensional ``mesh`` holds."""
    return own_rows(num_rows, mesh.get_local_rank(), mesh.size())


def as_sharded(local: Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """Return this rank's rows as a DTensor of ``shape``; shares memory with ``local``."""
    stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def gathered(local: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """Return a whole tensor of ``shape`` from all ranks' rows; ``local``: this rank's rows. A collective."""
    return as_sharded(local, mesh, shape).full_tensor()


def is_sharded(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is sharded over ranks."""
    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
