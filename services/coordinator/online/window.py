"""The newest values of a series, and their median, spread and mean without a look at all of them. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

__all__ = ["Window"]


class Window:
    """At most ``size`` values: one more costs a binary search and a shift, a question at most a binary search."""

    def __init__(self, size: int) -> None:
        self._newest: deque[float] = deque(maxlen=size)
        self._ordered: list[float] = []
        self._sum = self._squares = 0.0
        self._since = 0
        """Values since the sums were taken anew: what is added and subtracted again leaves rounding errors."""

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, value: float) -> None:
        """Take a value; the oldest one goes where there are ``size`` of them."""
        if len(self._newest) == self._newest.maxlen:
            oldest = self._newest[0]
            del self._ordered[bisect_left(self._ordered, oldest)]
            self._sum, self._squares = self._sum - oldest, self._squares - oldest * oldest
        self._newest.append(value)
        insort(self._ordered, value)
        self._sum, self._squares, self._since = self._sum + value, self._squares + value * value, self._since + 1
        if self._since >= (self._newest.maxlen or 1):
            self._sum, self._since = math.fsum(self._newest), 0
            self._squares = math.fsum(one * one for one in self._newest)

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum

    @property
    def mean(self) -> float:
        """Of at least one value."""
        return self._sum / len(self)

    @property
    def deviation(self) -> float:
        """The standard deviation of at least one value, about their mean."""
        return math.sqrt(max(0.0, self._squares / len(self) - self.mean**2))

    @property
    def median(self) -> float:
        """Of at least one value."""
        half = len(self) // 2
        middle = self._ordered[half]
        return middle if len(self) % 2 else (self._ordered[half - 1] + middle) / 2

    @property
    def mad(self) -> float:
        """The median of the distances of at least one value from their median."""
        centre, half = self.median, len(self) // 2
        upper = self._distance(centre, half + 1)
        return upper if len(self) % 2 else (self._distance(centre, half) + upper) / 2

    def _distance(self, centre: float, count: int) -> float:
        """The distance from ``centre`` within which ``count`` values lie: these are neighbours in their order."""
        values, low, high = self._ordered, 0, len(self._ordered) - count
        while low < high:
            middle = (low + high) // 2
            if centre - values[middle] > values[middle + count] - centre:
                low = middle + 1
            else:
                high = middle
        return max(centre - values[low], values[low + count - 1] - centre)
