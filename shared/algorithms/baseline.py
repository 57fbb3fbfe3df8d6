"""Baseline for data without groups: each prompt occurs once, so the mean reward of each kind of prompt is tracked over
batches.

Single-stream policy optimization (arXiv 2509.13232, §3.2): subtract the tracked value, then whiten over the batch. The
decay is constant here instead of depending on the KL. Plain floats, because the coordinator computes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["EVERYTHING", "Tracked", "mean_without", "sums_of", "track", "value_of"]

EVERYTHING = ""
"""Name of the bucket that counts the rewards of all prompts; its value is the prior of buckets with few rewards."""

Tracked = tuple[float, float]
"""``(weighted sum of rewards, sum of weights)`` of a bucket, with decaying weights."""


def value_of(tracked: Mapping[str, Tracked], bucket: str, *, value: float, weight: float) -> float:
    """Return the tracked mean reward of ``bucket`` (a kind of prompt), shrunk towards the mean of all rewards. The
    shrinkage is as if the bucket had received ``weight`` (> 0) additional rewards, each equal to the mean of all
    rewards.

    The bucket of all rewards is treated as if it had also received ``weight`` rewards equal to ``value``.
    """
    if bucket != EVERYTHING:
        value = value_of(tracked, EVERYTHING, value=value, weight=weight)
    total, seen = tracked.get(bucket, (0.0, 0.0))
    return (total + weight * value) / (seen + weight)


def track(tracked: Mapping[str, Tracked], sums: Mapping[str, Tracked], *, keep: float) -> dict[str, Tracked]:
    """For each bucket of ``sums``, the reward sums of a batch (from ``sums_of``), decay the sum in ``tracked`` and add
    the new one. Return the updated sums; those of other buckets are left out.

    A baseline is the value *before* the batch: it does not depend on the actions that it is subtracted from, so the
    policy gradient stays unbiased. For each bucket that occurs ``weight ← keep · weight + n`` and ``total ← keep ·
    total + Σ r``.

    Args:
        keep: decay in (0, 1]; 1 is the mean of all rewards.
    """
    after = {}
    for bucket, (added, number) in sums.items():
        total, weight = tracked.get(bucket, (0.0, 0.0))
        after[bucket] = keep * total + added, keep * weight + number
    return after


def mean_without(rewards: Sequence[float], own: Sequence[float]) -> float | None:
    """Return the mean of ``rewards`` after removal of the rewards ``own`` (leave-one-out: RLOO, arXiv 2402.14740, eq.
    8).

    ``rewards`` must include ``own``; the result is None if nothing else is in it. The sum is rounded once, so that the
    order of ``rewards`` has no influence.
    """
    others = len(rewards) - len(own)
    return math.fsum((*rewards, *(-reward for reward in own))) / others if others else None


def sums_of(rewards: Sequence[tuple[str, float]]) -> dict[str, Tracked]:
    """Return ``(sum of rewards, number of rewards)`` of each bucket and of all buckets together. The result does not
    depend on the order of the ``(bucket, reward)`` pairs."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for bucket, reward in rewards:
        for name in _counted(bucket):
            found[name].append(reward)
    return {bucket: (sum(sorted(given)), float(len(given))) for bucket, given in found.items()}


def _counted(bucket: str) -> Iterable[str]:
    return dict.fromkeys((bucket, EVERYTHING))
