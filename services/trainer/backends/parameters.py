"""Which parameters of a model are trained, published and kept in checkpoints: all of them, or those of an adapter."""

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
    """A frozen policy as ``model`` is now; where that has an adapter, it shares the weights under it."""
    return share_base(model) if has_adapter(model) else copy.deepcopy(model).requires_grad_(False).eval()


class Reader(Protocol):
    """Shows the parameters of a module whole, by their names there. A collective where they are cut over ranks."""

    def in_blocks(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """``read(name)`` for each, while the parameters of that decoder block are whole; valid until the next one."""

    def one_by_one(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Each parameter without its neighbours."""


class WholeModel:
    """A ``Reader`` of a module that one process holds."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def in_blocks(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """See ``Reader``."""
        return map(read, names)

    def one_by_one(self, names: Sequence[str]) -> Iterator[Tensor]:
        """See ``Reader``."""
        return (self._model.get_parameter(name).detach() for name in names)


class Parameters:
    """The parameters of one model, by what becomes of them.

    Args:
        lora: of the adapter that ``model`` has; None: the whole model is trained.
        keep_base: whether checkpoints hold the weights under the adapter: they are not simply those of `model.path`.
        reader: how they are read as whole tensors.
        dtype: of the whole tensors; None: that of the parameters.
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
        """Parameters that the optimizer changes after the warm start."""
        return dict(self._model.named_parameters()) if self._lora is None else adapter_parameters(self._model)

    def train_base(self, whole: bool) -> None:
        """Give gradients to the weights under the adapter in place of it, or the other way round."""
        for parameter in self._model.parameters():
            parameter.grad = None
        if self._lora is not None:
            self._base_digest = None
            for parameter in base_parameters(self._model).values():
                parameter.requires_grad_(whole)
            for parameter in adapter_parameters(self._model).values():
                parameter.requires_grad_(not whole)

    def layout(self) -> TensorLayout:
        """See ``Backend``."""
        return self._layout(base_parameters(self._model))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return self._in_blocks(partial(merged_weight, self._model))

    def published_layout(self) -> TensorLayout:
        """See ``Backend``."""
        return self._layout(adapter_parameters(self._model)) if self._publishes_adapter else self.layout()

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        if not self._publishes_adapter:
            return self.weights()
        names = self._adapter_names
        return zip(map(stored_name, names), self._reader.one_by_one(names), strict=True)

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return self._in_blocks(self._plain) if self._publishes_adapter else iter(())

    def of_twin(self, twin: PreTrainedModel) -> dict[str, nn.Parameter]:
        """The parameters that a ``reference_of`` this model does not share."""
        return dict(twin.named_parameters()) if self._lora is None else adapter_parameters(twin)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def kept(self) -> dict[str, nn.Parameter]:
        """Whole weights that a checkpoint holds: all, those under the adapter, or none."""
        return base_parameters(self._model) if self._lora is None or self._keep_base else {}

    def adapter(self) -> dict[str, nn.Parameter]:
        """The adapter; empty without one."""
        return adapter_parameters(self._model) if self._lora is not None else {}

    def pins(self) -> dict[str, str]:
        """Digest of the weights under the adapter; empty without one. Found at the first call after they changed."""
        if self._lora is None:
            return {}
        if self._base_digest is None:
            copies = ((name, tensor.clone()) for name, tensor in self._in_blocks(self._plain))  # numpy will share them
            self._base_digest = digest_of_tensors(copies)
        return {"base": self._base_digest}

    def check_base(self, pins: dict[str, str]) -> None:
        """Raise CheckpointError where an adapter belongs to another base than the one that was loaded."""
        if not self._keep_base and pins.get("base", "") != self.pins().get("base", ""):
            raise CheckpointError(
                f"the checkpoint's adapter belongs to weights of digest '{pins.get('base', '')}', model.path holds "
                f"'{self.pins().get('base', '')}': give the model that the job was started with"
            )

    def base_loaded(self) -> None:
        """The weights under the adapter were replaced."""
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
