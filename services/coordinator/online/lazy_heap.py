"""Provides a heap with lazy deletion: the smallest of many values that change often. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from heapq import heapify, heappop, heappush

__all__ = ["SLACK", "LazyHeap"]

SLACK = 1024
"""Outdated entries that may stay in a small heap. A heap is cleaned at twice its valid entries plus this."""


class LazyHeap:
    """A heap of ``(value, name)`` that drops an outdated entry when it surfaces, or when the heap is cleaned.

    A push costs O(log n), the lowest value one pop for each outdated entry before it. The heap holds at most twice its
    valid entries plus ``SLACK``.

    Args:
        is_valid: returns True while ``value`` is still the value of ``name``.
    """

    def __init__(self, is_valid: Callable[[float, str], bool]) -> None:
        self._is_valid = is_valid
        self._heap: list[tuple[float, str]] = []
        self._most = SLACK

    def __len__(self) -> int:
        """Number of entries, outdated ones included."""
        return len(self._heap)

    def put(self, value: float, name: str) -> None:
        """Set the value of a name; earlier entries of that name become outdated."""
        heappush(self._heap, (value, name))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in dict.fromkeys(self._heap) if self._is_valid(*entry)]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + SLACK

    def lowest(self, without: Container[str] = ()) -> float | None:
        """Return the lowest valid value of the names outside ``without``, or None."""
        passed, found = list[tuple[float, str]](), None
        while self._heap and found is None:
            value, name = self._heap[0]
            if self._is_valid(value, name) and name not in without:
                found = value
                break
            entry = heappop(self._heap)
            if name in without:
                passed.append(entry)
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def pop_until(self, limit: float, *, inclusive: bool = True) -> Iterator[str]:
        """Remove and yield the names whose valid values lie below ``limit`` (or on it, if inclusive), lowest first."""
        while self._heap and (self._heap[0][0] < limit or (inclusive and self._heap[0][0] == limit)):
            entry = heappop(self._heap)
            while self._heap and self._heap[0] == entry:  # a caller put the same entry twice
                heappop(self._heap)
            if self._is_valid(*entry):
                yield entry[1]
