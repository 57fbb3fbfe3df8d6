"""A Hugging Face model whose parameters are cut by rows over the ranks (FSDP2, arXiv 2304.11277).

The functional decoder reads weights from the modules of the model wherever it needs them. So the units that FSDP
gathers and gives back are modules without a computation of their own: each calls the function it is given, while its
weights are whole.

::

    root    embedding, final norm, head    around the whole forward pass
    block   one decoder block              around the block, with activation checkpointing inside

Shape legend: T = tokens, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.services.trainer.row_shards import local_part, rows_of_mesh
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.models.architecture import plan_of, run_blocks_by

__all__ = ["ShardedModel", "Sharding"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is cut.

    Attributes:
        mesh: one dimension, all ranks, on the device that computes.
        compute_dtype: type of gathered weights and activations.
        reduce_dtype: type in which gradients are summed over ranks.
        reshard_after_forward: give gathered blocks back between forward and backward.
        checkpointing: compute blocks again in the backward pass.
        offload: keep the parts in host memory.
    """

    mesh: DeviceMesh
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    checkpointing: bool
    offload: bool


class _Unit(nn.Module):
    """Its parameters are whole while the function runs."""

    def __init__(self, *parts: nn.Module, checkpointing: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._checkpointing = checkpointing

    def forward(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        if self._checkpointing and torch.is_grad_enabled():
            return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return function(*inputs)


class ShardedModel:
    """Cuts ``model`` in place and runs functions over it.

    Args:
        model: on the CPU, whole, the same on every rank; its parameters have the type of the parts.

    Raises:
        ConfigError: the functional decoder does not know this architecture.
    """

    def __init__(self, model: PreTrainedModel, sharding: Sharding) -> None:
        plan = plan_of(model)
        if plan is None:
            raise ConfigError(
                f"backend.type fsdp cuts models of the Llama and Qwen families, not {type(model).__name__}: use 'local'"
            )
        self.model, self._sharding = model, sharding
        model.base_model.rotary_emb.to(sharding.mesh.device_type)  # no unit's: all of it is computed from positions
        owners = {id(param): "" for param in model.parameters()}
        self.names = [name for name, _ in model.named_parameters()]
        self._blocks = [_Unit(block, checkpointing=sharding.checkpointing) for block in model.base_model.layers]
        for index, block in enumerate(self._blocks):
            owners |= {id(param): str(index) for param in block.parameters()}
        unit_of = {name: owners[id(param)] for name, param in model.named_parameters()}
        self._runs = [(key, list(names)) for key, names in groupby(self.names, key=unit_of.__getitem__)]
        self._root = _Unit(plan.embedding, plan.final_norm.module, plan.head, *self._blocks)
        for unit in (*self._blocks, self._root):
            self._cut(unit, None if unit is self._root else sharding.reshard_after_forward)
        run_blocks_by(model, lambda index, block, x_TD: self._blocks[index](block, x_TD))
        with torch.no_grad():
            self.run(lambda: None)  # FSDP decides at the first forward pass which unit is the root
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        assert all(isinstance(param, DTensor) for param in self.params.values()), "a unit was left gathered"

    def run(self, function: Callable[[], R]) -> R:
        """``function()`` with the weights that it needs at hand; a collective. Keep the result's graph until backward.

        Without gradients everything gathered is given back at once: weights must not be stale after the next step.
        """
        result: R = self._root(function)
        if not torch.is_grad_enabled():
            self.release()
        return result

    def release(self) -> None:
        """Give back what is gathered, after a forward pass that no backward pass follows."""
        for unit in (self._root, *self._blocks):
            _fsdp(unit).reshard()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters of ``compute_dtype`` in the order of ``names``; a collective.

        One unit is gathered at a time: a tensor is valid until the next one is asked for. Do not share it with numpy.
        """
        for key, names in self._runs:
            unit = _fsdp(self._blocks[int(key)] if key else self._root)
            unit.unshard()
            try:
                whole = dict(self.model.named_parameters())
                for name in names:
                    yield name, whole[name].detach()
            finally:
                unit.reshard()

    def parts(self) -> dict[str, Tensor]:
        """This rank's rows of every parameter; live."""
        return {name: local_part(param.detach()) for name, param in self.params.items()}

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's rows out of a whole or a cut tensor.

        Raises:
            CheckpointError: the model has no such parameter, or one of another shape.
        """
        if name not in self.params or tensor.shape != self.params[name].shape:
            raise CheckpointError(f"'{name}' {tuple(tensor.shape)} is not a parameter of this model")
        rows = slice(None) if isinstance(tensor, DTensor) else rows_of_mesh(tensor.shape[0], self._sharding.mesh)
        local_part(self.params[name].detach()).copy_(local_part(tensor)[rows])

    def _cut(self, unit: nn.Module, reshard: bool | None) -> None:
        sharding = self._sharding
        fully_shard(
            unit,
            mesh=sharding.mesh,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=sharding.compute_dtype, reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            if sharding.offload
            else OffloadPolicy(),
        )
        _fsdp(unit).set_gradient_divide_factor(1.0)  # sums: losses are divided by the size of the whole batch already
        _fsdp(unit).set_force_sum_reduction_for_comms(True)  # gloo knows no other


def _fsdp(unit: nn.Module) -> FSDPModule:
    assert isinstance(unit, FSDPModule)
    return unit
