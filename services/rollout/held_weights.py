"""Copies of the weights of the last policy versions, for texts that one of them wrote."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.shared.weights import Staged

__all__ = ["HeldWeights", "WeightRing"]


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The tensors published as a policy ``version``, by name; with adapters alone published, those."""

    version: int
    tensors: Mapping[str, Tensor]


class WeightRing:
    """At most ``limit`` versions; the oldest makes room for a new one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[int, HeldWeights] = OrderedDict()

    def find(self, version: int) -> HeldWeights | None:
        """The weights of a version, if they are here."""
        return self._held.get(version)

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()

    def keep(self, staged: Staged) -> bool:
        """Copy a version; blocks for as long as that takes.

        Returns:
            Whether it is held: not where its memory was written to meanwhile, or nothing is to be held.
        """
        version = staged.manifest.version
        if not self._limit or version in self._held:
            return bool(self._limit)
        while len(self._held) >= self._limit:
            self._held.popitem(last=False)
        tensors = {name: tensor.clone() for name, tensor in staged.tensors().items()}
        if not staged.intact():
            return False
        self._held[version] = HeldWeights(version, tensors)
        return True
