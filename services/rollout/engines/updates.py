"""A weight update of one model: staged beside the weights and swapped in, or copied into them chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.services.rollout.engines.base import UpdateMode
from penstock.shared.errors import WeightsError

__all__ = ["WeightUpdate"]


@dataclass(slots=True)
class WeightUpdate:
    """Parameters of ``version`` on their way into ``model``."""

    model: PreTrainedModel
    version: int
    digest: str
    mode: UpdateMode
    guard: Callable[[], bool] | None
    touched: bool = False
    """A weight of the model was changed, and the update is not complete."""
    _staged: dict[int, Tensor] = field(default_factory=dict)
    """By identity of the parameter: tied parameters have several names."""

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Take some parameters; tied ones may come under any of their names.

        Raises:
            WeightsError: an unknown name, another shape or another type; nothing of this chunk was taken.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in tensors.items():
            _check(name, tensor, parameters.get(name))
        for name, tensor in tensors.items():
            parameter = parameters[name]
            if self.mode == "in_place":
                self.touched = True
                parameter.data.copy_(tensor)
            self._staged[id(parameter)] = tensor

    def commit(self) -> None:
        """Make the staged tensors the weights; for a swap only pointers change.

        Raises:
            WeightsError: a parameter was not staged, or the guard says no.
        """
        missing = [name for name, parameter in self.model.named_parameters() if id(parameter) not in self._staged]
        if missing:
            raise WeightsError(f"version {self.version} lacks {len(missing)} parameters, among them '{missing[0]}'")
        if self.guard is not None and not self.guard():
            raise WeightsError(f"the memory of version {self.version} was overwritten before it was committed")
        if self.mode == "swap":
            for parameter in self.model.parameters():
                parameter.data = self._staged[id(parameter)].to(parameter.device)
        self.touched = False


def _check(name: str, tensor: Tensor, parameter: torch.nn.Parameter | None) -> None:
    if parameter is None:
        raise WeightsError(f"the model has no parameter '{name}'")
    if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
        raise WeightsError(
            f"'{name}' is {tensor.dtype}{list(tensor.shape)}, the model has {parameter.dtype}{list(parameter.shape)}"
        )
