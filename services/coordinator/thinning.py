"""Fewer points of a curve that still looks the same. Pure.

Largest-triangle-three-buckets (S. Steinarsson, "Downsampling Time Series for Visual Representation", 2013), over
several curves with one axis: the area of a step is the sum of its triangles in every curve, each scaled to its range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["largest_triangles"]


def largest_triangles(steps: Sequence[int], curves: Sequence[Sequence[float | None]], max_points: int) -> list[int]:
    """Places (ascending) of the steps that stay, at most ``max_points`` >= 2; the first and the last always do.

    A place where a curve has no value has no triangle in it.
    """
    count = len(steps)
    if count <= max_points:
        return list(range(count))
    if max_points == 2:
        return [0, count - 1]
    x_N = np.asarray(steps, np.float64)
    y_CN = np.array([_scaled(curve) for curve in curves]) if curves else np.zeros((1, count))
    edges = np.linspace(1, count - 1, max_points - 1).astype(np.int64)
    chosen = [0]
    for bucket in range(max_points - 2):
        start, stop = int(edges[bucket]), int(edges[bucket + 1])
        end = int(edges[bucket + 2]) if bucket + 2 < len(edges) else count
        chosen.append(start + _largest(x_N, y_CN, chosen[-1], slice(start, stop), slice(stop, max(end, stop + 1))))
    return [*chosen, count - 1]


def _largest(x_N: NDArray[np.float64], y_CN: NDArray[np.float64], last: int, here: slice, after: slice) -> int:
    """Place within ``here`` whose triangle with the point ``last`` and the mean of ``after`` is the largest."""
    later_C = _means(y_CN[:, after])
    base, later = x_N[last], x_N[after].mean()
    area_CK = np.abs(
        (base - later) * (y_CN[:, here] - y_CN[:, [last]]) - (base - x_N[here]) * (later_C - y_CN[:, [last]])
    )
    return int(np.nansum(area_CK, axis=0).argmax())


def _means(y_CK: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the values of each curve, [C, 1]; NaN where it has none."""
    known_CK = np.isfinite(y_CK)
    num_C = known_CK.sum(axis=1, keepdims=True)
    total_C = np.where(known_CK, y_CK, 0.0).sum(axis=1, keepdims=True)
    return np.where(num_C > 0, total_C / np.maximum(num_C, 1), np.nan)


def _scaled(curve: Sequence[float | None]) -> NDArray[np.float64]:
    """Values between 0 and 1, NaN where there is none."""
    y_N = np.array([np.nan if value is None else value for value in curve], np.float64)
    known_N = np.isfinite(y_N)
    if not known_N.any():
        return np.full(len(y_N), np.nan)
    low, high = y_N[known_N].min(), y_N[known_N].max()
    y_N[~known_N] = np.nan
    return (y_N - low) / (high - low) if high > low else np.where(known_N, 0.0, np.nan)
