"""Copies of the weights of recent policy versions, used to score texts that those versions wrote."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.shared.weights import Staged

__all__ = ["HeldWeights", "WeightRing"]


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Tensors of a published policy ``version`` by name: only the adapter's tensors if the job publishes only
    adapters."""

    version: int
    tensors: Mapping[str, Tensor]


class WeightRing:
    """Ring of at most ``limit`` versions; a new version replaces the oldest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[int, HeldWeights] = OrderedDict()

    def find(self, version: int) -> HeldWeights | None:
        """Return the weights of a version, or None."""
        return self._held.get(version)

    def clear(self) -> None:
        """Drop all versions."""
        self._held.clear()

    def keep(self, staged: Staged) -> bool:
        """Copy a version to host memory. Blocks during the copy.

        Returns:
            True if the version is held; False if its memory was overwritten meanwhile or ``limit`` is 0.
        """
        version = staged.manifest.version
        if not self._limit or version in self._held:
            return bool(self._limit)
        while len(self._held) >= self._limit:
            self._held.popitem(last=False)
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in staged.tensors().items()}
        if not staged.intact():
            return False
        self._held[version] = HeldWeights(version, tensors)
        return True
