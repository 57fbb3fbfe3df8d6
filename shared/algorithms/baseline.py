"""A baseline for data without groups: each prompt comes once, so the value of its kind is tracked over time.

Single-stream policy optimization (arXiv 2509.13232, §3.2): subtract the tracked value, then whiten over the batch. What
is forgotten is a constant share here, not one that follows the KL. Plain floats: whoever seals a batch computes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["EVERYTHING", "Tracked", "mean_without", "sums_of", "track", "value_of"]

EVERYTHING = ""
"""The bucket of all rewards, to which one that has seen few falls back."""

Tracked = tuple[float, float]
"""``(weighted sum of rewards, sum of weights)`` of a bucket, older rewards counting less."""


def value_of(tracked: Mapping[str, Tracked], bucket: str, *, value: float, weight: float) -> float:
    """Weighted mean reward of a bucket, as if it had given ``weight`` (> 0) rewards of the value of everything.

    That one begins as if it had given ``weight`` rewards of ``value``.
    """
    if bucket != EVERYTHING:
        value = value_of(tracked, EVERYTHING, value=value, weight=weight)
    total, seen = tracked.get(bucket, (0.0, 0.0))
    return (total + weight * value) / (seen + weight)


def track(tracked: Mapping[str, Tracked], sums: Mapping[str, Tracked], *, keep: float) -> dict[str, Tracked]:
    """The buckets that change by a batch with these ``sums_of`` rewards, as they are after it.

    A baseline is the value *before* the batch: it does not depend on the actions that it judges, so the policy gradient
    stays unbiased. For each bucket that occurs ``weight ← keep · weight + n`` and ``total ← keep · total + Σ r``.

    Args:
        keep: in (0, 1], how much of the past remains; 1 is the mean of everything.
    """
    after = {}
    for bucket, (added, number) in sums.items():
        total, weight = tracked.get(bucket, (0.0, 0.0))
        after[bucket] = keep * total + added, keep * weight + number
    return after


def mean_without(rewards: Sequence[float], own: Sequence[float]) -> float | None:
    """Mean of the rewards but for some of them (leave-one-out: RLOO, arXiv 2402.14740, eq. 8); None where none is left.

    Rounded once, so that it does not depend on their order.
    """
    others = len(rewards) - len(own)
    return math.fsum((*rewards, *(-reward for reward in own))) / others if others else None


def sums_of(rewards: Sequence[tuple[str, float]]) -> dict[str, Tracked]:
    """``(Σ r, n)`` of each bucket in a batch of ``(bucket, reward)``, and of everything; in whatever order they are."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for bucket, reward in rewards:
        for name in _counted(bucket):
            found[name].append(reward)
    return {bucket: (sum(sorted(given)), float(len(given))) for bucket, given in found.items()}


def _counted(bucket: str) -> Iterable[str]:
    return dict.fromkeys((bucket, EVERYTHING))
