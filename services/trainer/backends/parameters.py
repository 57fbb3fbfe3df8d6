"""Which parameters of a model are trained, published and kept in checkpoints: all of them, or those of an adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.services.trainer.backends.base import TensorLayout
from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import CheckpointError
from penstock.shared.models.lora import adapter_parameters, base_parameters, merged_weights, share_base
from penstock.shared.weights import digest_of_tensors

__all__ = ["Parameters"]


class Parameters:
    """The parameters of one model, by what becomes of them.

    Args:
        lora: of the adapter that ``model`` has; None: the whole model is trained.
        keep_base: whether checkpoints hold the weights under the adapter: they are not simply those of `model.path`.
    """

    def __init__(self, model: PreTrainedModel, lora: LoraConfig | None, *, keep_base: bool) -> None:
        self._model, self._lora = model, lora
        self._keep_base = keep_base
        self._base_digest: str | None = None

    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer changes after the warm start."""
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
        return _layout(base_parameters(self._model))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return merged_weights(self._model)

    def published_layout(self) -> TensorLayout:
        """See ``Backend``."""
        return _layout(adapter_parameters(self._model)) if self._publishes_adapter else self.layout()

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return _detached(adapter_parameters(self._model)) if self._publishes_adapter else self.weights()

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Backend``."""
        return _detached(base_parameters(self._model)) if self._publishes_adapter else iter(())

    def reference(self) -> PreTrainedModel:
        """A frozen policy as the model is now; with an adapter it shares the weights under it."""
        if self._lora is not None:
            return share_base(self._model)
        return copy.deepcopy(self._model).requires_grad_(False).eval()

    def of_twin(self, twin: PreTrainedModel) -> dict[str, nn.Parameter]:
        """The parameters that a ``reference`` does not share."""
        return dict(twin.named_parameters()) if self._lora is None else adapter_parameters(twin)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def kept(self) -> dict[str, nn.Parameter]:
        """Whole weights that a checkpoint holds: all, those under the adapter, or none."""
        return base_parameters(self._model) if self._lora is None or self._keep_base else {}

    def adapter(self) -> dict[str, nn.Parameter]:
        """The adapter; empty without one."""
        return adapter_parameters(self._model) if self._lora is not None else {}

    def pins(self) -> dict[str, str]:
        """Digest of the weights under the adapter; empty without one."""
        if self._lora is None:
            return {}
        if self._base_digest is None:
            self._base_digest = digest_of_tensors(_detached(base_parameters(self._model)))
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


def _layout(parameters: dict[str, nn.Parameter]) -> TensorLayout:
    return [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in parameters.items()]


def _detached(parameters: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.detach()) for name, parameter in parameters.items())
