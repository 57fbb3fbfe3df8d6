"""Finds unusual values of a source of feedback, given its earlier values of the same metric. Pure.

Two rules apply, each to one source (API key) and metric:

- A float is an outlier if its distance from the median exceeds ``max_deviation`` times 1.4826 MAD (the median absolute
  deviation, scaled to estimate the standard deviation of a normal distribution; Hampel 1974).
- A source drifts while its exponentially weighted moving average is further from its usual mean than ``max_drift``
  standard deviations of that average, sigma sqrt(w / (2 - w)) (EWMA control chart; Roberts 1959).

The share of a boolean metric is estimated with two values of each kind added (Agresti and Coull 1998), so that a value
that never occurred is not unusual for that reason alone.

Usual values are learned only from accepted feedback, so rejected feedback shifts nothing. The moving average takes
every value but outliers, so that a source that returns to normal is accepted again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass

from penstock.shared.config.online.quarantine import QuarantineConfig

__all__ = ["Outliers", "Window"]

MAD_TO_SIGMA = 1.4826
SMALLEST_SHARE = 0.02
"""Smallest spread, as a share of the metric's range: equal values alone make no other value unusual."""
MAX_SERIES = 20_000
"""Pairs of source and metric in memory; above this the one used least recently is dropped."""


class Window:
    """The newest ``size`` values of a series, with running statistics.

    Adding a value costs a binary search and a shift, a query at most a binary search.
    """

    def __init__(self, size: int) -> None:
        self._newest: deque[float] = deque(maxlen=size)
        self._ordered: list[float] = []
        self._sum = self._squares = 0.0
        self._since = 0
        """Values since the sums were recomputed: adding and subtracting leaves rounding errors."""

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, value: float) -> None:
        """Add a value, and drop the oldest one from a full window."""
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
        """Sum of all values."""
        return self._sum

    @property
    def mean(self) -> float:
        """Mean of at least one value."""
        return self._sum / len(self)

    @property
    def deviation(self) -> float:
        """Standard deviation of at least one value."""
        return math.sqrt(max(0.0, self._squares / len(self) - self.mean**2))

    @property
    def median(self) -> float:
        """Median of at least one value."""
        half = len(self) // 2
        middle = self._ordered[half]
        return middle if len(self) % 2 else (self._ordered[half - 1] + middle) / 2

    @property
    def mad(self) -> float:
        """Median absolute deviation from the median, of at least one value."""
        centre, half = self.median, len(self) // 2
        upper = self._distance(centre, half + 1)
        return upper if len(self) % 2 else (self._distance(centre, half) + upper) / 2

    def _distance(self, centre: float, count: int) -> float:
        """Return the distance from ``centre`` that contains ``count`` values; these are neighbours in sorted order."""
        values, low, high = self._ordered, 0, len(self._ordered) - count
        while low < high:
            middle = (low + high) // 2
            if centre - values[middle] > values[middle + count] - centre:
                low = middle + 1
            else:
                high = middle
        return max(centre - values[low], values[low + count - 1] - centre)


@dataclass(slots=True)
class _Series:
    usual: Window
    average: float = math.nan


class Outliers:
    """Statistics of each source, in the order of the stream."""

    def __init__(self, config: QuarantineConfig) -> None:
        self._config = config
        self._series: OrderedDict[tuple[str, str], _Series] = OrderedDict()

    def judge(self, source: str, metric: str, value: bool | float, span: float) -> str:
        """Return why the next value of a source is unusual; learn a usual one and return ''.

        Args:
            span: largest difference between two values of the metric.
        """
        series, number = self._of(source, metric), float(value)
        is_known = len(series.usual) >= self._config.min_items
        if is_known and (reason := self._deviation(series, value, span)):
            return reason
        before = series.average
        series.average = number if math.isnan(before) else before + self._config.smoothing * (number - before)
        if is_known and (reason := self._drift(series, value, span)):
            return reason
        series.usual.add(number)
        return ""

    def learn(self, source: str, metric: str, value: bool | float) -> None:
        """Learn a value that a user released from quarantine."""
        self._of(source, metric).usual.add(float(value))

    def _of(self, source: str, metric: str) -> _Series:
        key = source, metric
        if key not in self._series:
            self._series[key] = _Series(Window(self._config.window))
            if len(self._series) > MAX_SERIES:
                self._series.popitem(last=False)
        self._series.move_to_end(key)
        return self._series[key]

    def _deviation(self, series: _Series, value: bool | float, span: float) -> str:
        if isinstance(value, bool):  # either boolean is usual by itself; only their share can drift
            return ""
        median = series.usual.median
        sigma = max(MAD_TO_SIGMA * series.usual.mad, SMALLEST_SHARE * span)
        far = abs(value - median) / sigma
        if far <= self._config.max_deviation:
            return ""
        return f"outlier: {value:.4g} is {far:.1f} deviations from the median {median:.4g}"

    def _drift(self, series: _Series, value: bool | float, span: float) -> str:
        weight = self._config.smoothing
        if isinstance(value, bool):
            mean = (series.usual.sum + 2) / (len(series.usual) + 4)
            sigma = math.sqrt(mean * (1 - mean))
        else:
            mean = series.usual.mean
            sigma = max(series.usual.deviation, SMALLEST_SHARE * span)
        far = abs(series.average - mean) / (sigma * math.sqrt(weight / (2 - weight)))
        if far <= self._config.max_drift:
            return ""
        return f"drift: the moving average {series.average:.4g} is {far:.1f} deviations from the mean {mean:.4g}"
