"""A weight update: staged beside the parameters and swapped in, or copied into them chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from penstock.services.rollout.engines.base import UpdateMode
from penstock.shared.errors import Conflict, WeightsError
from penstock.shared.protocol.generation import WeightInfo

__all__ = ["ServedWeights", "Update", "WeightUpdate", "drop", "lent"]


class Update(Protocol):
    """An update on its way: to ``version`` with ``digest``, of the frozen weights under an adapter if ``base``."""

    @property
    def version(self) -> int:
        """Policy version."""

    @property
    def digest(self) -> str:
        """Digest of its weights."""

    @property
    def base(self) -> bool:
        """True if the version that is served stays."""


U = TypeVar("U", bound=Update)


class ServedWeights(Generic[U]):
    """The version that an engine serves, and the one update of it that may be open."""

    def __init__(self, version: int = -1, digest: str = "", base: str = "") -> None:
        self.version, self.digest, self.base = version, digest, base
        self.dirty = False
        self._open: U | None = None

    @property
    def update(self) -> U | None:
        """The open update."""
        return self._open

    def begin(self, update: U) -> U:
        """Open an update. Raises Conflict where another one is open."""
        self.check_none()
        self._open = update
        return update

    def check_none(self) -> None:
        """Raise Conflict where an update is open."""
        if self._open is not None:
            raise Conflict(f"the update to version {self._open.version} is open: commit or abort it first")

    def current(self) -> U:
        """The open update. Raises Conflict where there is none."""
        if self._open is None:
            raise Conflict("no update is open: call begin_update first")
        return self._open

    def adopt(self) -> None:
        """The open update is what is served now."""
        update = self.current()
        if update.base:
            self.base = update.digest
        else:
            self.version, self.digest, self.dirty = update.version, update.digest, False
        self._open = None

    def give_up(self, *, dirty: bool) -> None:
        """Close the open update; ``dirty``: the weights are no version any more. Safe to repeat."""
        self._open = None
        self.dirty = self.dirty or dirty

    def info(self) -> WeightInfo:
        """The version that is served."""
        return WeightInfo(version=self.version, digest=self.digest, dirty=self.dirty, base=self.base)


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
