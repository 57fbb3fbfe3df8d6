"""Frozen model that this process holds whole.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.trainer.backends.base import TensorLayout
from penstock.services.trainer.backends.scoring import score_tensors
from penstock.services.trainer.batch.packing import Microbatch

__all__ = ["FrozenModel", "layout_of_module"]


class FrozenModel:
    """Implements ``Teacher`` in one process. Moves ``model`` to ``device`` and computes no gradients for it.

    ``digest``: digest of the weights of ``model``.
    """

    def __init__(self, model: PreTrainedModel, digest: str, *, device: str) -> None:
        self.digest = digest
        self._device = torch.device(device)
        self._model = model.requires_grad_(False).to(self._device).eval()

    def layout(self) -> TensorLayout:
        """Return the layout of the whole weights; see ``Teacher``."""
        return layout_of_module(self._model)

    @torch.no_grad()
    def score(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs of the scored tokens; see ``Teacher``."""
        if microbatch is None:
            return torch.empty(0, device=self._device, dtype=torch.float32)
        return score_tensors(self._model, microbatch.to(self._device), role="policy")[0]


def layout_of_module(model: PreTrainedModel) -> TensorLayout:
    """Return names, shapes and types of the whole parameters; tied parameters appear once."""
    return [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in model.named_parameters()]
