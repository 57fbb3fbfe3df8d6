"""Provides a heap with lazy deletion: the smallest of many values that change often. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

__all__ = ["SLACK", "LazyHeap"]

SLACK = 1024
"""Number of outdated entries that may stay in a small heap, which is cleaned at twice its names plus this."""
CLEANED = 8
"""Entries that one push checks during cleaning; checking a million at once would block the event loop."""

N = TypeVar("N", bound=Hashable)


class LazyHeap(Generic[N]):
    """A heap of ``(value, name)`` that drops an outdated entry when it surfaces, or when the heap is cleaned.

    A push costs O(log n), the lowest value one pop for each outdated entry before it. Whatever is pushed, the heap
    holds at most about three times its names plus ``SLACK``.

    Args:
        is_valid: returns True while ``value`` is still the value of ``name``.
        num_names: returns a number that the names with a value do not exceed.
    """

    def __init__(self, is_valid: Callable[[float, N], bool], num_names: Callable[[], int]) -> None:
        self._is_valid, self._num_names = is_valid, num_names
        self._heap: list[tuple[float, N]] = []
        self._unclean: list[tuple[float, N]] = []
        """Another heap: the entries that are not cleaned yet."""
        self._cleaned: set[tuple[float, N]] = set()

    def __len__(self) -> int:
        """Number of entries, outdated ones included."""
        return len(self._heap) + len(self._unclean)

    def put(self, value: float, name: N) -> None:
        """Set the value of a name; earlier entries of that name become outdated."""
        heappush(self._heap, (value, name))
        if self._unclean:
            self._clean()
        elif len(self._heap) > 2 * self._num_names() + SLACK:
            self._heap, self._unclean = [], self._heap

    def lowest(self, without: Container[N] = ()) -> float | None:
        """Return the lowest valid value of the names outside ``without``, or None."""
        passed, found = list[tuple[float, N]](), None
        while found is None and (heap := self._lower()):
            value, name = heap[0]
            if self._is_valid(value, name) and name not in without:
                found = value
                break
            entry = heappop(heap)
            if name in without:
                passed.append(entry)
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def pop_until(self, limit: float, *, inclusive: bool = True) -> Iterator[N]:
        """Remove and yield the names whose valid values lie below ``limit`` (or on it, if inclusive), lowest first."""
        while (heap := self._lower()) and (heap[0][0] < limit or (inclusive and heap[0][0] == limit)):
            entry = heappop(heap)
            while (heap := self._lower()) and heap[0] == entry:  # a caller put the same entry twice
                heappop(heap)
            if self._is_valid(*entry):
                yield entry[1]

    def _lower(self) -> list[tuple[float, N]]:
        """Return the heap with the lower first entry, which is empty only if both are."""
        if not self._unclean or (self._heap and self._heap[0] <= self._unclean[0]):
            return self._heap
        return self._unclean

    def _clean(self) -> None:
        """Drop or move the last entries of the heap that is not cleaned; without them it is still a heap."""
        for _ in range(min(CLEANED, len(self._unclean))):
            entry = self._unclean.pop()
            if self._is_valid(*entry) and entry not in self._cleaned:
                self._cleaned.add(entry)
                heappush(self._heap, entry)
        if not self._unclean:
            self._cleaned = set()
