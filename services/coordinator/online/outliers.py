"""What is unusual for a source of feedback, given what it said of the same metric before. Pure.

Two rules, each of one source (API key) and metric alone:

- A float is an outlier whose distance from the median is more than ``max_deviation`` times 1.4826 MAD (the median
  absolute deviation, scaled to estimate the standard deviation of a normal distribution; Hampel 1974).
- The source has drifted while its exponentially weighted moving average is further from its usual mean than
  ``max_drift`` standard deviations of that average, sigma sqrt(w / (2 - w)) (EWMA control chart; Roberts 1959).

The share of a boolean metric is estimated with two values of each kind added (Agresti and Coull 1998), so that a value
which was never said is not thereby unusual.

What is usual is learnt only from values that were let through, so nobody shifts it with what is held back; the moving
average takes every value but outliers, so that a source which comes back is heard again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from penstock.services.coordinator.online.window import Window
from penstock.shared.config.quarantine import QuarantineConfig

__all__ = ["Outliers"]

MAD_TO_SIGMA = 1.4826
SMALLEST_SHARE = 0.02
"""A spread below this share of the metric's range is taken for this: equal values make no other value unusual."""
MAX_SERIES = 20_000
"""Pairs of source and metric that are remembered; beyond, the one that was heard least recently is forgotten."""


@dataclass(slots=True)
class _Series:
    usual: Window
    average: float = math.nan


class Outliers:
    """What each source says, in the order of the stream of feedback."""

    def __init__(self, config: QuarantineConfig) -> None:
        self._config = config
        self._series: OrderedDict[tuple[str, str], _Series] = OrderedDict()

    def judge(self, source: str, metric: str, value: bool | float, span: float) -> str:
        """Why the next value of a source is held back, '' where it is as usual, and then learnt.

        Args:
            span: the largest difference that two values of the metric make.
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
        """Somebody says that a value which was held back is as it should be."""
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
        if isinstance(value, bool):  # either of two values is as usual as the other; only their share may change
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
