"""The lowest of many marks that come and go, without a look at all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from heapq import heapify, heappop, heappush

__all__ = ["SLACK", "Marks"]

SLACK = 1024
"""Entries that no longer hold and stay all the same: a heap is cleaned once it has twice as many as held then."""


class Marks:
    """A heap of (mark, name) in which an entry that no longer holds stays until it is met, or the heap is cleaned.

    One more costs a push; the lowest one as many pops as entries before it no longer hold. Memory: at most twice the
    entries that hold, and SLACK.

    Args:
        holds: whether a mark is still that of a name.
    """

    def __init__(self, holds: Callable[[float, str], bool]) -> None:
        self._holds = holds
        self._heap: list[tuple[float, str]] = []
        self._most = SLACK

    def __len__(self) -> int:
        """Entries, also those that no longer hold."""
        return len(self._heap)

    def put(self, mark: float, name: str) -> None:
        """A name has a mark now; what it had before no longer holds."""
        heappush(self._heap, (mark, name))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in dict.fromkeys(self._heap) if self._holds(*entry)]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + SLACK

    def lowest(self, without: Container[str] = ()) -> float | None:
        """The lowest mark that holds, of the names that are not ``without``; None where there is none."""
        passed, found = list[tuple[float, str]](), None
        while self._heap and found is None:
            mark, name = self._heap[0]
            if self._holds(mark, name) and name not in without:
                found = mark
                break
            entry = heappop(self._heap)
            if name in without:
                passed.append(entry)
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def pop_until(self, limit: float, *, inclusive: bool = True) -> Iterator[str]:
        """Names whose marks hold and lie below ``limit``, or on it, the lowest first; each is taken out."""
        while self._heap and (self._heap[0][0] < limit or (inclusive and self._heap[0][0] == limit)):
            entry = heappop(self._heap)
            while self._heap and self._heap[0] == entry:  # the same was put twice
                heappop(self._heap)
            if self._holds(*entry):
                yield entry[1]
