"""A weight update: staged beside the parameters and swapped in, or copied into them chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from penstock.services.rollout.engines.base import UpdateMode
from penstock.shared.errors import WeightsError

__all__ = ["WeightUpdate", "drop", "lent"]


@dataclass(slots=True)
class WeightUpdate:
    """Tensors of ``version`` on their way into ``parameters``; tied parameters stand there under all their names."""

    parameters: Mapping[str, Tensor]
    version: int
    digest: str
    mode: UpdateMode
    guard: Callable[[], bool] | None
    base: bool = False
    """The parameters are those under the adapter."""
    touched: bool = False
    """A parameter was changed, and the update is not complete."""
    replaced: list[Tensor] = field(default_factory=list)
    """The parameters before the swap: a thread that does not decode drops them, for memory is freed slowly."""
    _staged: dict[int, Tensor] = field(default_factory=dict)
    """By identity of the parameter: tied parameters have several names."""

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Take some parameters; tied ones may come under any of their names.

        Raises:
            WeightsError: an unknown name, another shape or another type; nothing of this chunk was taken.
        """
        for name, tensor in tensors.items():
            _check(name, tensor, self.parameters.get(name))
        for name, tensor in tensors.items():
            parameter = self.parameters[name]
            if self.mode == "in_place":
                self.touched = True
                parameter.data.copy_(tensor)
            self._staged[id(parameter)] = tensor

    def commit(self) -> None:
        """Make the staged tensors the weights; for a swap only pointers change.

        Raises:
            WeightsError: a parameter was not staged, or the guard says no.
        """
        missing = [name for name, parameter in self.parameters.items() if id(parameter) not in self._staged]
        if missing:
            raise WeightsError(f"version {self.version} lacks {len(missing)} parameters, among them '{missing[0]}'")
        if self.guard is not None and not self.guard():
            raise WeightsError(f"the memory of version {self.version} was overwritten before it was committed")
        if self.mode == "swap":
            for parameter in {id(each): each for each in self.parameters.values()}.values():
                self.replaced.append(parameter.data)
                parameter.data = self._staged[id(parameter)].to(parameter.device)
        self.touched = False


@contextmanager
def lent(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block ``parameters`` have the values ``tensors``; only pointers change. In the thread that uses them.

    Raises:
        WeightsError: they are those of another model.
    """
    known = {name: parameters[name] for name in tensors if name in parameters}
    for name, tensor in tensors.items():
        _check(name, tensor, known.get(name))
    own = {name: parameter.data for name, parameter in known.items()}
    try:
        for name, parameter in known.items():
            parameter.data = tensors[name].to(parameter.device)
        yield
    finally:
        for name, parameter in known.items():
            parameter.data = own[name]


def _check(name: str, tensor: Tensor, parameter: Tensor | None) -> None:
    if parameter is None:
        raise WeightsError(f"the model has no parameter '{name}'")
    if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
        raise WeightsError(
            f"'{name}' is {tensor.dtype}{list(tensor.shape)}, the model has {parameter.dtype}{list(parameter.shape)}"
        )


def drop(tensors: list[Tensor]) -> None:
    """One by one: to free the memory of a whole model at once would hold up every thread."""
    while tensors:
        tensors.pop()
