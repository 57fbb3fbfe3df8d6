"""Agreement of two raters on the same items, corrected for chance. Uses Python floats, because the coordinator, which
runs without torch, computes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Paired", "add_pairs", "concordance"]

Paired = tuple[float, float, float, float, float, float]
"""``(n, Σx, Σy, Σx², Σy², Σxy)`` of the ratings of a rater (x) and the reference (y) for the same items."""

NOTHING: Paired = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def add_pairs(known: Mapping[str, Paired], pairs: Iterable[tuple[str, float, float]]) -> dict[str, Paired]:
    """Return a copy of ``known``, the sums by rater, with ``pairs`` added. A pair ``(rater, x, y)`` has the rating x of
    this rater and the rating y of the reference for the same item."""
    found = dict(known)
    for rater, x, y in pairs:
        n, sx, sy, sxx, syy, sxy = found.get(rater, NOTHING)
        found[rater] = (n + 1, sx + x, sy + y, sxx + x * x, syy + y * y, sxy + x * y)
    return found


def concordance(paired: Paired) -> float:
    """Return Lin's concordance correlation, ``2 s_xy / (s_x² + s_y² + (x̄ - ȳ)²)`` (Biometrics 45, 1989), in [-1, 1].

    For binary ratings it equals Cohen's kappa. It is 0 if both raters always gave the same single value, which
    is no evidence of agreement.
    """
    n, sx, sy, sxx, syy, sxy = paired
    if n == 0:
        return 0.0
    mean_x, mean_y = sx / n, sy / n
    spread = sxx / n - mean_x**2 + syy / n - mean_y**2 + (mean_x - mean_y) ** 2
    return 2 * (sxy / n - mean_x * mean_y) / spread if spread > 1e-12 * (1 + sxx / n + syy / n) else 0.0
