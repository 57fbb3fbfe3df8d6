"""Exchange of small data between the ranks of one update: properties of the batch, sums of metrics, votes.

Every method is a collective: all ranks call it in the same order with the same names. Results are equal on every rank,
and so is everything computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Alone", "Collective", "union"]


class Collective(Protocol):
    """Group of ranks of one trainer that exchange small host data. The backends themselves exchange gradients and
    weights."""

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gather(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
        """Return the arrays of every rank in rank order: one-dimensional, same names and dtypes; lengths may differ."""

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return sums over ranks in float64."""

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return maxima over ranks."""

    def agree(self, ok: bool) -> bool:
        """Return True if every rank passed True."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes. The other ranks pass None."""


class Alone:
    """The ``Collective`` of a single process."""

    rank = 0
    size = 1

    def gather(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
        """Return the arrays of this process in a list; see ``Collective``."""
        return [dict(arrays)]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return ``values``, because there is no other rank; see ``Collective``."""
        return dict(values)

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return ``values``, because there is no other rank; see ``Collective``."""
        return dict(values)

    def agree(self, ok: bool) -> bool:
        """Return ``ok``, because there is no other rank; see ``Collective``."""
        return ok

    def broadcast(self, data: bytes | None) -> bytes:
        """Return ``data``, because there is no other rank; see ``Collective``."""
        assert data is not None, "rank 0 gives the bytes"
        return data


def union(names: Iterable[str], collective: Collective) -> list[str]:
    """Return the sorted union of the ``names`` of all ranks."""
    own = np.frombuffer("\n".join(names).encode(), np.uint8)
    texts = [part["names"].tobytes().decode() for part in collective.gather({"names": own})]
    return sorted({name for text in texts for name in text.split("\n") if name})
