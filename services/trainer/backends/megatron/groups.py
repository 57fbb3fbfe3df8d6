"""The process groups of one backend: megatron-core's global state, opened once for each process and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.services.trainer.backends.megatron.core import parallel_state, tensor_parallel
from penstock.shared.config.backend import MegatronConfig
from penstock.shared.errors import ConfigError

__all__ = ["Groups", "open_groups"]


_present: dict[str, tuple[object, int, int]] = {}
"""What megatron-core's state was built for: it does not notice when the process group under it is another one."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of this rank.

    Attributes:
        tensor: ranks that hold different parts of the same layers.
        context: ranks that hold different tokens of the same microbatch.
        gradients: ranks whose gradients add up: other tokens, same parts (data and context parallel).
    """

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    gradients: dist.ProcessGroup

    def in_tensor(self) -> tuple[int, int]:
        """(rank, size) in ``tensor``."""
        return self.tensor.rank(), self.tensor.size()

    def in_context(self) -> tuple[int, int]:
        """(rank, size) in ``context``."""
        return self.context.rank(), self.context.size()


def open_groups(config: MegatronConfig) -> Groups:
    """megatron-core's groups over all ranks; a process that nobody launched as a rank is a world of one.

    Raises:
        ConfigError: the ranks cannot be divided this way.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    world = dist.get_world_size()
    if world % config.model_parallel:
        raise ConfigError(
            f"{world} trainer ranks cannot be divided by backend.tensor_parallel x context_parallel = "
            f"{config.tensor_parallel} x {config.context_parallel}"
        )
    _open_parallel_state(config.tensor_parallel, config.context_parallel)
    # The forward pass draws no random numbers; this tracker needs no CUDA generator.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    return Groups(
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _open_parallel_state(tensor_parallel: int, context_parallel: int) -> None:
    """Build megatron-core's groups, unless they are there: over this process group and of these sizes."""
    wanted = (dist.group.WORLD, tensor_parallel, context_parallel)
    if parallel_state.is_initialized():
        if _present.get("groups") == wanted:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        context_parallel_size=context_parallel,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_deadline() / timedelta(minutes=1),
    )
    _present["groups"] = wanted


def _deadline() -> timedelta:
    """How long the ranks wait for each other elsewhere; megatron-core's own groups would wait for half an hour."""
    assert dist.group.WORLD is not None
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    deadline: timedelta = options._timeout
    return deadline
