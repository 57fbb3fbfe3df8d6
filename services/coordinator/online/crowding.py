"""What is given up where more waits than can be taken: nobody fills memory with answers that come too late. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

__all__ = ["MAX_WAITING", "crowded", "most_ready"]

MAX_WAITING = 50_000
"""Episodes without a decision."""
KEPT = 0.75
"""Share of the bound that is left, so that this happens now and then and not each time."""


def most_ready(max_draws: int) -> int:
    """Episodes that may be ready to be trained: beyond ``max_draws`` of them are too old before their turn comes."""
    return max(256, 4 * max_draws)


def crowded(waiting: Iterable[tuple[str, str]], most: int) -> list[str]:
    """Which of ``waiting`` (owner and name, the oldest first) go where there are more than ``most``.

    The oldest ones of whoever has the most, down to a part of the bound or, before that, to what the next owner has.
    """
    by_owner: defaultdict[str, list[str]] = defaultdict(list)
    for owner, name in waiting:
        by_owner[owner].append(name)
    excess = sum(map(len, by_owner.values()))
    if excess <= most:
        return []
    excess -= int(KEPT * most)
    sizes = sorted(map(len, by_owner.values()))
    heaviest = max(by_owner.values(), key=len)
    ahead = sizes[-1] - sizes[-2] if len(sizes) > 1 else sizes[-1]
    return heaviest[: min(excess, max(ahead, len(heaviest) // 4, 1))]
