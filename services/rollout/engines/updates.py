"""Weight updates: tensors are staged beside the parameters and swapped in, or copied into them chunk by chunk.

What is staged for a swap is on the device of the parameters before decoding stops for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from penstock.services.rollout.engines.base import UpdateMode
from penstock.shared.errors import Conflict, WeightsError
from penstock.shared.protocol.generation import WeightInfo
from penstock.shared.weights.pinned import PinnedCopies

__all__ = ["ServedWeights", "Update", "WeightUpdate", "drop", "lent"]


class Update(Protocol):
    """An open update of an engine's weights."""

    @property
    def version(self) -> int:
        """Policy version."""

    @property
    def digest(self) -> str:
        """Digest of the weights of the version."""

    @property
    def base(self) -> bool:
        """True if the update changes only the frozen base weights, so that the served version stays the same."""


U = TypeVar("U", bound=Update)


class ServedWeights(Generic[U]):
    """Version that an engine serves, and its open update: at most one at a time."""

    def __init__(self, version: int = -1, digest: str = "", base: str = "") -> None:
        self.version, self.digest, self.base = version, digest, base
        self.dirty = False
        self._open: U | None = None

    @property
    def update(self) -> U | None:
        """The open update, or None."""
        return self._open

    def begin(self, update: U) -> U:
        """Open an update. Raises Conflict if another one is open."""
        self.check_none()
        self._open = update
        return update

    def check_none(self) -> None:
        """Raise Conflict if an update is open."""
        if self._open is not None:
            raise Conflict(f"the update to version {self._open.version} is open: commit or abort it first")

    def current(self) -> U:
        """Return the open update. Raises Conflict if there is none."""
        if self._open is None:
            raise Conflict("no update is open: call begin_update first")
        return self._open

    def adopt(self) -> None:
        """Make the version of the open update the served one, and close the update."""
        update = self.current()
        if update.base:
            self.base = update.digest
        else:
            self.version, self.digest, self.dirty = update.version, update.digest, False
        self._open = None

    def give_up(self, *, dirty: bool) -> None:
        """Close the open update without adopting it; ``dirty``: the weights are partly overwritten. Safe to repeat."""
        self._open = None
        self.dirty = self.dirty or dirty

    def info(self) -> WeightInfo:
        """Return the served version and whether the weights are dirty."""
        return WeightInfo(version=self.version, digest=self.digest, dirty=self.dirty, base=self.base)


@dataclass(slots=True)
class WeightUpdate:
    """Update of ``parameters`` to the tensors of ``version``; tied parameters appear under each of their names."""

    parameters: Mapping[str, Tensor]
    version: int
    digest: str
    mode: UpdateMode
    guard: Callable[[], bool] | None
    base: bool = False
    """True if ``parameters`` are the frozen ones under the adapter."""
    copies: PinnedCopies | None = None
    """Copies tensors of the host to the device in mode 'swap', if the parameters are on a GPU."""
    given_up: bool = False
    """True once the update is unwanted; copies in progress then end soon."""
    touched: bool = False
    """True if a parameter was overwritten and the update is not committed."""
    replaced: list[Tensor] = field(default_factory=list)
    """Parameter data before the swap. Freeing it is slow, so the decoding thread leaves that to another thread."""
    _staged: dict[int, Tensor] = field(default_factory=dict)
    """Staged tensor by ``id`` of the parameter, since tied parameters have several names."""

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Stage tensors by parameter name; a tied parameter may come under any of its names.

        If there are ``copies``, this takes as long as they do, and the tensors are not read after it.

        Raises:
            WeightsError: a name is unknown, a shape or dtype differs, or a copy failed; no tensor of this chunk was
                staged.
        """
        for name, tensor in tensors.items():
            _check(name, tensor, self.parameters.get(name))
        for name, tensor in (self._moved(tensors) if self.mode == "swap" else tensors).items():
            parameter = self.parameters[name]
            if self.mode == "in_place":
                self.touched = True
                parameter.data.copy_(tensor)
            self._staged[id(parameter)] = tensor

    def commit(self) -> None:
        """Activate the staged tensors as the weights. In mode 'swap', only pointers are exchanged.

        Raises:
            WeightsError: a parameter was not staged, or the guard returns False.
        """
        missing = [name for name, parameter in self.parameters.items() if id(parameter) not in self._staged]
        if missing:
            raise WeightsError(f"version {self.version} lacks {len(missing)} parameters, among them '{missing[0]}'")
        if self.guard is not None and not self.guard():
            raise WeightsError(f"the memory of version {self.version} was overwritten before it was committed")
        if self.mode == "swap":
            for parameter in {id(each): each for each in self.parameters.values()}.values():
                self.replaced.append(parameter.data)
                parameter.data = self._staged[id(parameter)]
        self.touched = False

    def _moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors on the devices of their parameters."""
        if self.copies is None:
            return {name: tensor.to(self.parameters[name].device) for name, tensor in tensors.items()}
        here = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        return {**tensors, **self.copies.copy(here, lambda: not self.given_up)}


@contextmanager
def lent(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the data of ``parameters`` by ``tensors`` within the block; only exchanges pointers.

    Must run in the thread that uses the parameters.

    Raises:
        WeightsError: a name is unknown, or a shape or dtype differs.
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
    """Free the tensors one by one: freeing a whole model at once would block every thread."""
    while tensors:
        tensors.pop()
