"""This rank's rows of what a model and its optimizer hold: copied out for checkpoints and filled from them."""

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
    """One tensor, as far as this rank holds it.

    Attributes:
        part: live; a scalar is the same on every rank.
        shape: of the whole tensor.
        dtype: in which it is stored.
    """

    part: Tensor
    shape: torch.Size
    dtype: torch.dtype

    def whole(self) -> Tensor:
        """Shape and type of what is stored, without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def copy(self, mesh: DeviceMesh) -> Tensor:
        """In host memory, as a part of the whole tensor; ``mesh`` is that of the CPUs."""
        copied = self.part.detach().to("cpu", self.dtype, copy=True)
        return as_sharded(copied, mesh, self.shape) if self.shape else copied

    @torch.no_grad()
    def load(self, saved: Tensor, mesh: DeviceMesh) -> None:
        """Copy this rank's rows out of a whole tensor, or out of a cut one of the same mesh."""
        if self.shape and not is_sharded(saved):
            saved = saved[rows_of_mesh(len(saved), mesh)]
        self.part.copy_(local_part(saved))


def rows_of(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, Rows]:
    """Of DTensors, to be stored in ``dtype``."""
    return {name: Rows(local_part(param.detach()), param.shape, dtype) for name, param in parameters.items()}
