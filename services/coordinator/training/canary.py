"""Canary trials: assigns conversations to the version on trial, and decides by feedback if the version passes. Pure.

A hash of the conversation's name and the version on trial decides which arm a conversation belongs to. So every
coordinator finds the same arm, and each trial assigns conversations anew. The number of conversations is fixed
beforehand, so checking more often does not change the decision.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import xxhash

from penstock.shared.config.online.canary import CanaryConfig
from penstock.shared.config.online.promotion import PromotionConfig
from penstock.shared.protocol.events import Admitted, CanaryBegun, CanaryJudged, Event, Judged, LineageForked, Promoted

__all__ = ["Arm", "Verdict", "arms_of", "flaws_of_canaries", "is_in_canary", "lower_bound", "row_of", "verdict_of"]

POINTS = 1 << 64
SMALLEST = 2
"""Number of conversations below which an arm has no variance."""


def is_in_canary(job: str, version: int, share: float, conversation: str) -> bool:
    """Return True if a hash assigns the conversation to the version on trial, which gets a ``share`` of all
    conversations."""
    return xxhash.xxh3_64_intdigest(f"{job}:{version}:{conversation}".encode()) < share * POINTS


@dataclass(frozen=True, slots=True)
class Arm:
    """Rewards of the conversations in one arm: their number, mean and unbiased variance."""

    count: int
    mean: float
    variance: float

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Arm:
        """Compute an arm from rewards; the mean of no rewards is NaN, and so is the variance of fewer than two."""
        count = len(rewards)
        mean = math.fsum(rewards) / count if count else math.nan
        spread = math.fsum((reward - mean) ** 2 for reward in rewards)
        return cls(count, mean, spread / (count - 1) if count >= SMALLEST else math.nan)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a trial, its reason, and the figures of both arms."""

    status: Literal["wait", "passed", "timed out", "refused"]
    reason: str
    figures: dict[str, float]


def arms_of(judged: Iterable[Judged]) -> tuple[Arm, Arm]:
    """Return the rewards of the version on trial and of the served version, as two arms.

    The unit is the conversation, because conversations were assigned to arms: several samples of one conversation count
    as their mean.
    """
    rewards: dict[tuple[bool, str], list[float]] = defaultdict(list)
    for one in judged:
        rewards[one.is_canary, one.conversation].append(one.reward)
    means = {key: math.fsum(found) / len(found) for key, found in rewards.items()}
    arms = [Arm.of([mean for (is_canary, _), mean in means.items() if is_canary is arm]) for arm in (True, False)]
    return arms[0], arms[1]


def lower_bound(first: Arm, second: Arm, confidence: float) -> float:
    """Return the one-sided lower confidence bound of ``first.mean - second.mean``; each arm needs two conversations.

    Welch, Biometrika 34 (1947), with the degrees of freedom of Satterthwaite (Biometrics 2, 1946).
    """
    difference = first.mean - second.mean
    squares = [arm.variance / arm.count for arm in (first, second)]
    total = sum(squares)
    if total == 0:
        return difference
    freedom = total**2 / sum(s**2 / (arm.count - 1) for s, arm in zip(squares, (first, second), strict=True))
    return difference - _student(confidence, freedom) * math.sqrt(total)


def _student(level: float, freedom: float) -> float:
    """Return the quantile ``level`` of Student's t distribution with ``freedom`` degrees of freedom.

    It is computed by an expansion about the quantile of the normal distribution (Abramowitz and Stegun, 26.7.5).
    """
    x = NormalDist().inv_cdf(level)
    first = (x**3 + x) / 4
    second = (5 * x**5 + 16 * x**3 + 3 * x) / 96
    third = (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384
    return x + first / freedom + second / freedom**2 + third / freedom**3


def verdict_of(config: CanaryConfig, begun: CanaryBegun, arms: tuple[Arm, Arm], *, now: float) -> Verdict:
    """Decide a trial: the new version passes if its mean reward is at most ``max_drop`` below that of the served
    version.

    The burden of proof lies on the new version (non-inferiority): the lower confidence bound of the difference must not
    be below ``-max_drop``.
    """
    canary, served = arms
    figures = _figures(canary, served)
    enough = min(canary.count, served.count) >= config.conversations
    if not enough and now < begun.time + config.max_wait_s:
        return Verdict("wait", "", figures)
    is_comparable = min(canary.count, served.count) >= SMALLEST
    if is_comparable:
        figures["canary/margin"] = lower_bound(canary, served, config.confidence)
    rewards = f"canary reward {canary.mean:.4g}, {served.mean:.4g} of version {begun.served}"
    if enough:
        margin = figures["canary/margin"]
        if margin >= -config.max_drop:
            return Verdict("passed", rewards, figures)
        return Verdict("refused", f"{rewards}: lower by up to {-margin:.4g} > {config.max_drop:.4g}", figures)
    few = f"{canary.count} and {served.count} of {config.conversations} conversations judged in {config.max_wait_s:g} s"
    is_worse = is_comparable and -lower_bound(served, canary, config.confidence) < -config.max_drop
    if config.on_timeout == "promote" and not is_worse:
        return Verdict("timed out", few, figures)
    return Verdict("refused", f"canary: {few}" + (f"; {rewards}" if is_worse else ""), figures)


def _figures(canary: Arm, served: Arm) -> dict[str, float]:
    found = {"canary/conversations": float(canary.count), "canary/served_conversations": float(served.count)}
    if canary.count:
        found["canary/reward"] = canary.mean
    if served.count:
        found["canary/served_reward"] = served.mean
    return found


def row_of(config: CanaryConfig, begun: CanaryBegun, arms: tuple[Arm, Arm]) -> dict[str, Any]:
    """Return the progress of a trial, for users and for the gateways that assign conversations."""
    canary, served = arms
    return {
        "version": begun.version,
        "served_version": begun.served,
        "share": begun.share,
        "since": begun.time,
        "until": begun.time + config.max_wait_s,
        "needed": config.conversations,
        "conversations": canary.count,
        "reward": canary.mean if canary.count else None,
        "served_conversations": served.count,
        "served_reward": served.mean if served.count else None,
    }


def flaws_of_canaries(entries: Iterable[Iterable[Event]], config: PromotionConfig | None) -> list[str]:
    """Return violations in a ledger: versions promoted without a passed trial, and trial answers that were trained."""
    flaws: list[str] = []
    begun: CanaryBegun | None = None
    judged: dict[str, Judged] = {}
    tried: set[str] = set()
    admitted: set[str] = set()
    for event in (event for entry in entries for event in entry):
        match event:
            case CanaryBegun():
                begun, judged = event, {}
            case CanaryJudged():
                judged = {one.interactions[0]: one for one in event.judged} | judged
                tried |= {name for one in event.judged if one.is_canary for name in one.interactions}
            case LineageForked():
                begun = None
            case Promoted() if config is not None and config.canary is not None:
                flaws += _flaws_of_trial(config.canary, event, begun, judged)
                begun = None
            case Admitted():
                admitted |= {name for one in event.admissions for name in (*one.interactions, *one.context)}
            case _:
                pass
    return flaws + [f"interaction {name} of a canary was admitted" for name in sorted(tried & admitted)]


def _flaws_of_trial(
    config: CanaryConfig, event: Promoted, begun: CanaryBegun | None, judged: dict[str, Judged]
) -> list[str]:
    expected = {"passed": "passed", "canary timed out": "timed out"}.get(event.reason)
    if expected is None:
        return []
    if begun is None or begun.version != event.version:
        return [f"version {event.version} was served to all without a canary"]
    verdict = verdict_of(config, begun, arms_of(judged.values()), now=event.time)
    if verdict.status == expected:
        return []
    return [f"version {event.version} was served to all: its canary is '{verdict.status}' ({verdict.reason})"]
