"""A frozen model, sharded by rows over the ranks and gathered block by block.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from penstock.services.trainer.backends.base import TensorLayout
from penstock.services.trainer.backends.frozen import layout_of_module
from penstock.services.trainer.backends.fsdp.sharded_model import ShardedModel, Sharding
from penstock.services.trainer.backends.scoring import score_tensors
from penstock.services.trainer.batch.packing import Microbatch, stand_in
from penstock.services.trainer.ranks.collective import Collective
from penstock.shared.config.backend import FSDPConfig

__all__ = ["ShardedFrozenModel"]


class ShardedFrozenModel:
    """Implements ``Teacher`` over all ranks, and shards ``model`` in place.

    Before, ``model`` must be whole, on the CPU and the same on every rank; ``digest`` is the digest of its weights.
    """

    def __init__(
        self, model: PreTrainedModel, digest: str, config: FSDPConfig, collective: Collective, *, device: str
    ) -> None:
        self.digest = digest
        self._layout = layout_of_module(model)
        self._device = torch.device(device)
        sharding = Sharding(
            mesh=init_device_mesh(self._device.type, (collective.size,)),
            compute_dtype=model.dtype,
            reduce_dtype=getattr(torch, config.reduce_dtype),
            reshard_after_forward=True,
            checkpointing=False,
            offload=config.cpu_offload or config.offload_reference,
        )
        self._sharded = ShardedModel(model.requires_grad_(False).eval(), sharding)

    def layout(self) -> TensorLayout:
        """Return the layout of the whole weights; see ``Teacher``."""
        return self._layout

    @torch.no_grad()
    def score(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs of the scored tokens; see ``Teacher``."""
        batch = (microbatch or stand_in()).to(self._device)
        values_M = self._sharded.run(lambda: score_tensors(self._sharded.model, batch, role="policy")[0])
        return values_M if microbatch is not None else values_M[:0]
