"""What one key or one user may have of a batch. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.shared.config.online import OnlineConfig
from penstock.shared.protocol.events import Admission

__all__ = ["Owners", "Shares", "over_share", "owners_of", "several", "shares_of"]


class Owners(NamedTuple):
    """Who stands behind a trajectory.

    ``judges``: the keys whose feedback its reward comes from; where nobody judged, the keys that asked, for their
    silence did. ``askers``: the keys that its answers were served to. ``users``: whose conversation it is.
    """

    judges: tuple[str, ...]
    askers: tuple[str, ...]
    users: tuple[str, ...]


def owners_of(admission: Admission) -> Owners:
    """Those of an admitted trajectory. Ledgers of earlier builds name the newest judge alone."""
    judges = admission.judges or [admission.key_id]
    users = admission.users or [admission.user]
    return Owners(tuple(judges), tuple(admission.askers or judges), tuple(users))


def shares_of(online: OnlineConfig) -> tuple[float, float, float]:
    """What one owner may have of a batch, in the order of ``Owners``."""
    return online.max_share_per_key, online.max_share_per_asker, online.max_share_per_user


class Shares:
    """Counts trajectories by owner, and takes none that would give somebody more than their share of ``size``.

    Args:
        least: what everybody may have, however small their share is.
        strict: whether whoever may have all of it has no more than ``size`` either.
    """

    def __init__(self, online: OnlineConfig, size: int, *, least: int = 0, strict: bool = True) -> None:
        self._bounds = [
            (max(least, share * size) if strict or share < 1 else math.inf, Counter[str]())
            for share in shares_of(online)
        ]  # fmt: skip

    def count(self, owners: Owners) -> None:
        """Somebody has one more, bounds or not."""
        for (_, taken), names in zip(self._bounds, owners, strict=True):
            taken.update(names)

    def take(self, trajectories: Sequence[Owners]) -> bool:
        """Count these in, all of them or, where one owner would have too many, none; whether they were."""
        if not self.holds(trajectories):
            return False
        for owners in trajectories:
            self.count(owners)
        return True

    def bar(self, trajectories: Sequence[Owners]) -> None:
        """Whoever would have too many by these takes nothing any more."""
        for place, (most, taken) in enumerate(self._bounds):
            new = Counter(name for owners in trajectories for name in owners[place])
            taken.update({name: math.ceil(most) for name, count in new.items() if taken[name] + count > most})

    def holds(self, trajectories: Sequence[Owners]) -> bool:
        """Whether these could be taken."""
        if not trajectories:
            return True
        for place, (most, taken) in enumerate(self._bounds):
            first = trajectories[0][place]
            if any(taken[name] + 1 > most for name in first):  # enough to refuse most of a flood
                return False
            if len(trajectories) > 1:
                new = Counter(name for owners in trajectories for name in owners[place])
                if any(taken[name] + count > most for name, count in new.items()):
                    return False
        return True


def over_share(online: OnlineConfig, batch: Sequence[Owners]) -> list[str]:
    """What is wrong with a batch: each owner who has more than their share of it."""
    found = []
    for place, (what, share) in enumerate(zip(("key", "asking key", "user"), shares_of(online), strict=True)):
        counts = Counter(name for owners in batch for name in owners[place])
        found += [
            f"{what} '{name}' has {count} of {len(batch)}, more than its share of {share:g}"
            for name, count in counts.items()
            if count > share * len(batch)
        ]
    return found


def several(online: OnlineConfig, batch: Sequence[Owners]) -> bool:
    """Whether no single owner stands behind all of it, as far as shares are bounded."""
    bounded = (place for place, share in enumerate(shares_of(online)) if share < 1)
    return all(len({name for owners in batch for name in owners[place]}) > 1 for place in bounded)
