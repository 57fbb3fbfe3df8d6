"""Exchange between the ranks of one update beside gradients: facts of the batch, sums of metrics, votes.

Every method is a collective: all ranks call it in the same order with the same names. Results are the same on every
rank, so whatever is computed from them is too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Alone", "Collective", "union"]


class Collective(Protocol):
    """The data-parallel ranks of one trainer. Small host data only; gradients and weights are the backend's."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gather(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
        """The arrays of every rank in rank order. One-dimensional; lengths may differ, names and dtypes may not."""

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks in float64."""

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """Maxima over ranks."""

    def agree(self, ok: bool) -> bool:
        """True if every rank said True."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes; the others pass None."""


class Alone:
    """A single process."""

    rank = 0
    size = 1

    def gather(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
        """See ``Collective``."""
        return [dict(arrays)]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """See ``Collective``."""
        return dict(values)

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """See ``Collective``."""
        return dict(values)

    def agree(self, ok: bool) -> bool:
        """See ``Collective``."""
        return ok

    def broadcast(self, data: bytes | None) -> bytes:
        """See ``Collective``."""
        assert data is not None, "rank 0 gives the bytes"
        return data


def union(names: Iterable[str], collective: Collective) -> list[str]:
    """Names that any rank has, sorted."""
    own = np.frombuffer("\n".join(names).encode(), np.uint8)
    texts = [part["names"].tobytes().decode() for part in collective.gather({"names": own})]
    return sorted({name for text in texts for name in text.split("\n") if name})
