"""Selection of the parameters that are trained, published and checkpointed: all of them, or those of an adapter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.services.trainer.backends.base import TensorLayout
from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.models.lora import (
    adapter_parameters,
    base_parameters,
    has_adapter,
    is_adapter,
    merged_weight,
    share_base,
    stored_name,
)
from penstock.shared.weights import digest_of_tensors

__all__ = ["Parameters", "Reader", "WholeModel", "reference_of"]


def reference_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of the policy ``model``. With an adapter, the copy shares the base weights."""
    return share_base(model) if has_adapter(model) else copy.deepcopy(model).requires_grad_(False).eval()


class Reader(Protocol):
    """Reads parameters of a module as whole tensors by name. A collective if parameters are sharded over ranks."""

    def in_blocks(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """Yield ``read(name)`` for each name. While ``read`` runs, the part of the model that contains the parameter
        ``name`` (usually a decoder block) is gathered whole.

        A tensor is valid until the iterator advances.
        """

    def one_by_one(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield each named parameter as a whole tensor. Gathers one parameter at a time."""


class WholeModel:
    """A ``Reader`` of a module that one process holds whole."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def in_blocks(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """Yield ``read(name)`` for each name; see ``Reader``."""
        return map(read, names)

    def one_by_one(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield each named parameter; see ``Reader``."""
        return (self._model.get_parameter(name).detach() for name in names)


class Parameters:
    """Groups the parameters of one model by use: training, publishing, checkpoints.

    Args:
        lora: config of the adapter in ``model``; None: the whole model is trained.
        keep_base: whether checkpoints hold the base weights under an adapter, because `model.path` does not hold them.
        reader: reads parameters as whole tensors.
        dtype: type of the whole tensors; None: the type of each parameter.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraConfig | None,
        *,
        keep_base: bool,
        reader: Reader,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self._lora, self._reader, self._dtype = model, lora, reader, dtype
        names = [name for name, _ in model.named_parameters()]
        self._adapter_names = [name for name in names if is_adapter(name)]
        self._base_names = [name for name in names if not is_adapter(name)]
        self._keep_base = keep_base
        self._base_digest: str | None = None

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer changes after the warm start."""
        return dict(self._model.named_parameters()) if self._lora is None else adapter_parameters(self._model)

    def train_base(self, whole: bool) -> None:
        """Drop all gradients. With an adapter, train either the base weights (``whole``) or the adapter from now on."""
        for parameter in self._model.parameters():
            parameter.grad = None
        if self._lora is not None:
            self._base_digest = None
            for parameter in base_parameters(self._model).values():
                parameter.requires_grad_(whole)
            for parameter in adapter_parameters(self._model).values():
                parameter.requires_grad_(not whole)

    def layout(self) -> TensorLayout:
        """Return the layout of the whole weights; see ``Backend``."""
        return self._layout(base_parameters(self._model))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by Hugging Face name; see ``Backend``."""
        return self._in_blocks(partial(merged_weight, self._model))

    def published_layout(self) -> TensorLayout:
        """Return the layout of the published tensors; see ``Backend``."""
        return self._layout(adapter_parameters(self._model)) if self._publishes_adapter else self.layout()

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to publish: the adapter or the whole weights; see ``Backend``."""
        if not self._publishes_adapter:
            return self.weights()
        names = self._adapter_names
        return zip(map(stored_name, names), self._reader.one_by_one(names), strict=True)

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights of a published adapter; see ``Backend``."""
        return self._in_blocks(self._plain) if self._publishes_adapter else iter(())

    def of_twin(self, twin: PreTrainedModel) -> dict[str, nn.Parameter]:
        """Return the parameters of ``twin`` (from ``reference_of``) that ``twin`` does not share with this model."""
        return dict(twin.named_parameters()) if self._lora is None else adapter_parameters(twin)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def kept(self) -> dict[str, nn.Parameter]:
        """Return the base parameters that a checkpoint holds: none under an adapter without ``keep_base``, else all."""
        return base_parameters(self._model) if self._lora is None or self._keep_base else {}

    def adapter(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the adapter; empty without one."""
        return adapter_parameters(self._model) if self._lora is not None else {}

    def pins(self) -> dict[str, str]:
        """Return ``{"base": digest of the base weights}``; empty without an adapter.

        The digest is computed once after each change of the base weights.
        """
        if self._lora is None:
            return {}
        if self._base_digest is None:
            copies = ((name, tensor.clone()) for name, tensor in self._in_blocks(self._plain))  # numpy shares memory
            self._base_digest = digest_of_tensors(copies)
        return {"base": self._base_digest}

    def check_base(self, pins: dict[str, str]) -> None:
        """Raise CheckpointError if a checkpoint's adapter does not belong to the loaded base weights.

        ``pins``: the environment stored in the checkpoint, with the digest of its base weights. Nothing is checked if
        checkpoints hold the base weights themselves.
        """
        if not self._keep_base and pins.get("base", "") != self.pins().get("base", ""):
            raise CheckpointError(
                f"the checkpoint's adapter belongs to weights of digest '{pins.get('base', '')}', model.path holds "
                f"'{self.pins().get('base', '')}': give the model that the job was started with"
            )

    def base_loaded(self) -> None:
        """Invalidate the digest after the base weights were replaced."""
        self._base_digest = None

    @property
    def _publishes_adapter(self) -> bool:
        return self._lora is not None and self._lora.publish == "adapters"

    def _plain(self, name: str) -> Tensor:
        parameter: Tensor = self._model.get_parameter(name)
        return parameter.detach()

    def _in_blocks(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        names = self._base_names
        return zip(map(stored_name, names), self._reader.in_blocks(names, read), strict=True)

    def _layout(self, parameters: dict[str, nn.Parameter]) -> TensorLayout:
        return [(name, tuple(p.shape), self._dtype or p.dtype) for name, p in parameters.items()]
