"""A Hugging Face model sharded by rows over the ranks (FSDP2, arXiv 2304.11277).

The functional decoder reads weights from any module of the model. Therefore the units that FSDP gathers and reshards
are modules without a computation of their own: each calls the function passed to it while its weights are whole.

::

    root    embedding, final norm, head    around the whole forward pass
    block   one decoder block              around the block, with activation checkpointing inside

A second model that shares parameters with the first is sharded together with it: its blocks are in the same units.
A model that the functional decoder does not know is one unit, whole in memory during its own forward and backward pass.

Shape legend: T = tokens, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

from penstock.services.trainer.ranks.row_shards import gathered, local_part
from penstock.shared.errors import ConfigError
from penstock.shared.models.architecture import plan_of, run_blocks_by

__all__ = ["ShardedModel", "Sharding"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Settings for sharding a model.

    Attributes:
        mesh: one-dimensional mesh of all ranks, on the device that computes.
        compute_dtype: type of gathered weights and of activations.
        reduce_dtype: type in which gradients are summed over ranks.
        reshard_after_forward: free gathered blocks between forward and backward.
        checkpointing: recompute blocks in the backward pass.
        offload: keep the shards in host memory.
    """

    mesh: DeviceMesh
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    checkpointing: bool
    offload: bool


class _Unit(nn.Module):
    """FSDP unit that runs a function while the unit's parameters are gathered."""

    def __init__(self, *parts: nn.Module, checkpointing: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._checkpointing = checkpointing

    def forward(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        if self._checkpointing and torch.is_grad_enabled():
            return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return function(*inputs)


class ShardedModel:
    """Shards ``model`` in place, and runs functions with its weights gathered. Is a ``Reader`` of its parameters.

    Args:
        model: on the CPU, whole, the same on every rank. Its parameters already have the types that the shards get. All
            parameters that the job ever trains have one type and require gradients at this time.
        twin: a model of the same architecture that shares some of the parameters; also sharded.

    Raises:
        ConfigError: blocks should be recomputed, and the functional decoder does not know this architecture.
    """

    def __init__(self, model: PreTrainedModel, sharding: Sharding, *, twin: PreTrainedModel | None = None) -> None:
        self.model, self._sharding = model, sharding
        models = (model,) if twin is None else (model, twin)
        plans = {each: plan for each in models if (plan := plan_of(each)) is not None}
        if not plans and sharding.checkpointing:
            raise ConfigError(
                "backend.activation_checkpointing: fsdp recomputes the blocks of Llama, Qwen and Mixtral models, not "
                f"of {type(model).__name__}: leave it out"
            )
        owners: dict[int, int] = {}
        for index, block in enumerate(model.base_model.layers if plans else ()):
            owners |= dict.fromkeys(map(id, block.parameters()), index)
        owner_of = {name: owners.get(id(param)) for name, param in model.named_parameters()}
        blocks = zip(*(each.base_model.layers for each in plans), strict=True)
        self._blocks = [_Unit(*block, checkpointing=sharding.checkpointing) for block in blocks]
        around = [part for plan in plans.values() for part in (plan.embedding, plan.final_norm.module, plan.head)]
        self._root = _Unit(*(around or [model]), *self._blocks)
        self._units = {name: self._root if i is None else self._blocks[i] for name, i in owner_of.items()}
        for unit in (*self._blocks, self._root):
            self._cut(unit, None if unit is self._root else sharding.reshard_after_forward)
        for each in plans:
            each.base_model.rotary_emb.to(sharding.mesh.device_type)  # in no unit: computed from positions
            run_blocks_by(each, lambda index, block, x_TD: self._blocks[index](block, x_TD))
        with torch.no_grad():
            self.run(lambda: None)  # FSDP decides at the first forward pass which unit is the root
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        assert all(isinstance(param, DTensor) for param in self.params.values()), "a unit was left gathered"

    def run(self, function: Callable[[], R]) -> R:
        """Run ``function()`` with the weights gathered, and return its result. A collective.

        With gradients, the caller must keep the autograd graph of the result until the backward pass. Without
        gradients, the gathered weights are freed at once, because the next optimizer step makes them stale.
        """
        result: R = self._root(function)
        if not torch.is_grad_enabled():
            self.release()
        return result

    def release(self) -> None:
        """Reshard gathered weights after a forward pass that no backward pass follows."""
        for unit in (self._root, *self._blocks):
            _fsdp(unit).reshard()

    def in_blocks(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """Yield ``read(name)`` for each name, and gather one FSDP unit at a time. See ``Reader``. The caller must not
        turn a tensor into a numpy array, which would share memory that FSDP frees."""
        for unit, run in groupby(names, key=self._units.__getitem__):
            _fsdp(unit).unshard()
            try:
                for name in run:
                    yield read(name)
            finally:
                _fsdp(unit).reshard()

    def one_by_one(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield each named parameter, gathered whole in ``compute_dtype``; see ``Reader``."""
        mesh = self._sharding.mesh
        for name in names:
            part = local_part(self.params[name].detach()).to(mesh.device_type, self._sharding.compute_dtype)
            yield gathered(part, mesh, self.params[name].shape)

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
        _fsdp(unit).set_gradient_divide_factor(1.0)  # sums: losses are already divided by the size of the whole batch
        _fsdp(unit).set_force_sum_reduction_for_comms(True)  # gloo supports only sums


def _fsdp(unit: nn.Module) -> FSDPModule:
    assert isinstance(unit, FSDPModule)
    return unit
