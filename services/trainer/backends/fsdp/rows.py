"""This rank's rows of model and optimizer tensors: copied out for checkpoints and loaded from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.services.trainer.ranks.row_shards import as_sharded, is_sharded, local_part, rows_of_mesh

__all__ = ["Rows", "rows_of"]


@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of one tensor.

    Attributes:
        part: the rows, in the memory of the model or optimizer itself; a scalar is the same on every rank.
        shape: shape of the whole tensor.
        dtype: type in which the tensor is stored.
    """

    part: Tensor
    shape: torch.Size
    dtype: torch.dtype

    def whole(self) -> Tensor:
        """Return a meta tensor with the shape and type of the stored tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def copy(self, mesh: DeviceMesh) -> Tensor:
        """Return a copy of the rows in host memory: a DTensor over the CPU mesh ``mesh``, or a plain scalar."""
        copied = self.part.detach().to("cpu", self.dtype, copy=True)
        return as_sharded(copied, mesh, self.shape) if self.shape else copied

    @torch.no_grad()
    def load(self, saved: Tensor, mesh: DeviceMesh) -> None:
        """Copy this rank's rows of ``saved``, a whole tensor or a DTensor over the same ranks, into ``part``."""
        if self.shape and not is_sharded(saved):
            saved = saved[rows_of_mesh(len(saved), mesh)]
        self.part.copy_(local_part(saved))


def rows_of(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, Rows]:
    """Return this rank's rows of ``parameters``, all of which are DTensors. ``dtype`` is that of checkpoints."""
    return {name: Rows(local_part(param.detach()), param.shape, dtype) for name, param in parameters.items()}
