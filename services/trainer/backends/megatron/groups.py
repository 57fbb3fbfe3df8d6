"""Process groups of the megatron backend. A process opens the group of a set of ranks once and then reuses it.

Ranks form a grid: tensor parallel varies fastest, then context parallel, pipeline stages and data parallel. Thus the
ranks of one copy of the model are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from penstock.services.trainer.backends.megatron import core
from penstock.shared.config.backend import MegatronConfig
from penstock.shared.errors import ConfigError

__all__ = ["Groups", "open_groups"]

Ints = NDArray[np.int64]

_open: dict[tuple[object, tuple[int, ...]], dist.ProcessGroup] = {}
"""Open groups by (world process group, ranks); opened in the same order on every rank."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups that contain this rank.

    Attributes:
        tensor: ranks that hold different parts of the same layers.
        context: ranks that hold different tokens of the same microbatch.
        pipeline: ranks that hold different layers, first stage first.
        ends: on the first and the last stage, the ranks of these two stages; on other stages, this rank alone.
        gradients: ranks that sum gradients: they hold the same parts, but get other tokens (data and context parallel).
        experts: subset of ``gradients`` that holds different experts of the same layers.
        same_experts: ranks of ``gradients`` that hold the same experts.
    """

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    ends: dist.ProcessGroup
    gradients: dist.ProcessGroup
    experts: dist.ProcessGroup
    same_experts: dist.ProcessGroup

    def in_tensor(self) -> tuple[int, int]:
        """Return this process's rank in the group ``tensor``, and the size of the group."""
        return self.tensor.rank(), self.tensor.size()

    def in_context(self) -> tuple[int, int]:
        """Return this process's rank in the group ``context``, and the size of the group."""
        return self.context.rank(), self.context.size()

    def in_pipeline(self) -> tuple[int, int]:
        """Return this process's pipeline stage, and the number of stages."""
        return self.pipeline.rank(), self.pipeline.size()

    def of_megatron(self) -> Any:
        """Return the groups as the collection that megatron-core's layers and schedules take."""
        return core.ProcessGroupCollection(
            tp=self.tensor, cp=self.context, pp=self.pipeline, dp_cp=self.gradients, embd=None, pos_embd=None
        )

    def from_stage(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Broadcast ``tensor`` from ``stage`` to all stages, and return it.

        The other stages pass a tensor of the same shape, which is overwritten.
        """
        if self.pipeline.size() > 1:
            dist.broadcast(tensor, dist.get_global_rank(self.pipeline, stage), group=self.pipeline)
        return tensor


def open_groups(config: MegatronConfig) -> Groups:
    """Open the groups over all ranks. A process without an initialized process group becomes a world of one.

    Raises:
        ConfigError: the number of ranks cannot be divided this way.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    world = dist.get_world_size()
    if world % config.model_parallel:
        raise ConfigError(
            f"{world} trainer ranks cannot be divided by backend.tensor_parallel x context_parallel x "
            f"pipeline_parallel = {config.tensor_parallel} x {config.context_parallel} x {config.pipeline_parallel}"
        )
    grid = np.arange(world).reshape(-1, config.pipeline_parallel, config.context_parallel, config.tensor_parallel)
    pipelines = grid.transpose(0, 2, 3, 1).reshape(-1, config.pipeline_parallel)
    others = grid.transpose(1, 3, 0, 2).reshape(-1, world // (config.pipeline_parallel * config.tensor_parallel))
    if others.shape[1] % config.expert_parallel:
        raise ConfigError(
            f"backend.expert_parallel {config.expert_parallel} does not divide the {others.shape[1]} context- and "
            f"data-parallel ranks ({world} trainer ranks): experts are dealt to ranks with other tokens"
        )
    by_experts = others.reshape(len(others), -1, config.expert_parallel)
    _prepare_megatron()
    return Groups(
        tensor=_own_group(grid.reshape(-1, config.tensor_parallel)),
        context=_own_group(grid.transpose(0, 1, 3, 2).reshape(-1, config.context_parallel)),
        pipeline=_own_group(pipelines),
        ends=_own_group([*(np.unique(p[[0, -1]]) for p in pipelines), *pipelines[:, 1:-1].reshape(-1, 1)]),
        gradients=_own_group(others),
        experts=_own_group(by_experts.reshape(-1, config.expert_parallel)),
        same_experts=_own_group(by_experts.transpose(0, 2, 1).reshape(-1, by_experts.shape[1])),
    )


def _own_group(partition: Iterable[Ints]) -> dist.ProcessGroup:
    """Return this rank's group in ``partition``, which divides all ranks into groups.

    Every rank opens all groups, in the same order.
    """
    for stale in [key for key in _open if key[0] is not dist.group.WORLD]:
        del _open[stale]
    own: dist.ProcessGroup | None = None
    for ranks in partition:
        key = (dist.group.WORLD, tuple(ranks.tolist()))
        if key not in _open:
            _open[key] = dist.new_group(list(key[1]), timeout=_deadline())
        own = _open[key] if dist.get_rank() in key[1] else own
    assert own is not None
    return own


def _prepare_megatron() -> None:
    """Initialize the part of megatron-core's global state that its layers need, without its many process groups."""
    if core.parallel_state._GLOBAL_MEMORY_BUFFER is None:
        core.parallel_state._set_global_memory_buffer()
    # The forward pass draws no random numbers; this tracker needs no CUDA generator.
    core.tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)


def _deadline() -> timedelta:
    """Return the timeout of the world process group."""
    assert dist.group.WORLD is not None
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    deadline: timedelta = options._timeout
    return deadline
