"""Limits the share that one API key or one user has of a batch and of the draws in flight. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.section import OnlineConfig
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.objective import Objective

__all__ = [
    "OVER_SHARE",
    "InFlightBounds",
    "OwnerShares",
    "Owners",
    "auxiliary_per_batch",
    "flaws_of_shares",
    "has_several_owners",
    "max_auxiliary_in_flight",
    "owners_of",
    "share_limits",
    "within_bounds",
]

OVER_SHARE = "over_share"
"""Reason of a turn that is not trained because earlier turns of its episode use up what its owner may have."""


class Owners(NamedTuple):
    """Keys and users behind a trajectory.

    ``judges`` are the API keys whose feedback made its reward, or, without feedback, the keys that sent the requests,
    because their silence made it. ``askers`` are the keys that received its answers, ``users`` their users.
    """

    judges: tuple[str, ...]
    askers: tuple[str, ...]
    users: tuple[str, ...]


def owners_of(admission: Admission) -> Owners:
    """Return the owners of an admitted trajectory. Ledgers of earlier versions name only the newest judge."""
    judges = admission.judges or [admission.key_id]
    users = admission.users or [admission.user]
    return Owners(tuple(judges), tuple(admission.askers or judges), tuple(users))


def share_limits(online: OnlineConfig) -> tuple[float, float, float]:
    """Return the shares of a batch that one owner of each kind may have, in the order of ``Owners``."""
    return online.max_share_per_key, online.max_share_per_asker, online.max_share_per_user


class OwnerShares:
    """Counts trajectories by owner, and accepts none that would exceed an owner's share of ``size``.

    Args:
        least: number that every owner may have, however small the share is.
        strict: limit an owner whose share is 1 to ``size``, too.
    """

    def __init__(self, online: OnlineConfig, size: int, *, least: int = 0, strict: bool = True) -> None:
        self._bounds = [
            (max(least, share * size) if strict or share < 1 else math.inf, Counter[str]())
            for share in share_limits(online)
        ]  # fmt: skip

    def add(self, owners: Owners) -> None:
        """Count a trajectory without checking limits."""
        for (_, taken), names in zip(self._bounds, owners, strict=True):
            taken.update(names)

    def try_add(self, trajectories: Sequence[Owners]) -> bool:
        """Count all of these and return True, or count none and return False if an owner would exceed a share."""
        if not self.fits(trajectories):
            return False
        for owners in trajectories:
            self.add(owners)
        return True

    def block(self, trajectories: Sequence[Owners]) -> None:
        """Accept nothing more from the owners that would exceed their share by these."""
        for place, (most, taken) in enumerate(self._bounds):
            new = Counter(name for owners in trajectories for name in owners[place])
            taken.update({name: math.ceil(most) for name, count in new.items() if taken[name] + count > most})

    def fits(self, trajectories: Sequence[Owners]) -> bool:
        """Return True if ``try_add`` would accept these."""
        if not trajectories:
            return True
        for place, (most, taken) in enumerate(self._bounds):
            first = trajectories[0][place]
            if any(taken[name] + 1 > most for name in first):  # this refuses most of a flood
                return False
            if len(trajectories) > 1:
                new = Counter(name for owners in trajectories for name in owners[place])
                if any(taken[name] + count > most for name, count in new.items()):
                    return False
        return True


def flaws_of_shares(online: OnlineConfig, batch: Sequence[Owners]) -> list[str]:
    """Describe each owner that has more than its share of a batch."""
    found = []
    for place, (what, share) in enumerate(zip(("key", "asking key", "user"), share_limits(online), strict=True)):
        counts = Counter(name for owners in batch for name in owners[place])
        found += [
            f"{what} '{name}' has {count} of {len(batch)}, more than its share of {share:g}"
            for name, count in counts.items()
            if count > share * len(batch)
        ]
    return found


def has_several_owners(online: OnlineConfig, batch: Sequence[Owners]) -> bool:
    """Return True if no single owner is behind all of ``batch``, for each kind of owner whose share is limited."""
    bounded = (place for place, share in enumerate(share_limits(online)) if share < 1)
    return all(len({name for owners in batch for name in owners[place]}) > 1 for place in bounded)


def auxiliary_per_batch(job: OnlineJob) -> int:
    """Return the largest number of groups of one update that serve other losses than the policy loss."""
    off_policy = job.online.off_policy
    return max(1, int(off_policy.max_share * job.groups_per_batch)) if off_policy is not None else 0


def max_auxiliary_in_flight(job: OnlineJob) -> int:
    """Return the largest number of draws in flight that serve other losses than the policy loss."""
    return (job.train.max_lag + 1) * auxiliary_per_batch(job)


@dataclass(frozen=True, slots=True)
class InFlightBounds:
    """Shares of one owner of all draws in flight, and of those for auxiliary losses (other than the policy loss).

    Every owner may have one auxiliary draw: the number that an update takes may be less than one share.
    """

    all: OwnerShares
    auxiliary: OwnerShares

    @classmethod
    def of(cls, job: OnlineJob) -> InFlightBounds:
        """Return bounds with nothing in flight."""
        return cls(
            OwnerShares(job.online, job.max_draws, strict=False),
            OwnerShares(job.online, max_auxiliary_in_flight(job), least=1, strict=False),
        )

    def add(self, owners: Owners, objective: Objective) -> None:
        """Count a draw without checking limits."""
        self.all.add(owners)
        if objective != "policy":
            self.auxiliary.add(owners)

    def try_add(self, found: Sequence[tuple[Owners, Objective]]) -> bool:
        """Count all of these and return True, or count none and return False.

        Where several trajectories belong together, nothing that comes later from the owners at their limit may overtake
        them: otherwise they would wait for ever.
        """
        every, auxiliary = (
            [owners for owners, _ in found],
            [owners for owners, objective in found if objective != "policy"],
        )
        fits = self.all.fits(every) and self.auxiliary.fits(auxiliary)
        if fits:
            for owners, objective in found:
                self.add(owners, objective)
        elif len(found) > 1:
            self.all.block(every)
            self.auxiliary.block(auxiliary)
        return fits


def within_bounds(
    job: OnlineJob,
    places: Collection[int],
    join: Callable[[Collection[int]], list[list[int]]],
    owners: Callable[[Sequence[int]], tuple[Owners, Objective]],
) -> list[list[int]]:
    """Choose the trajectories of an episode that fit into the bounds with nothing else in flight, earlier ones first.

    They are admitted together. More would never fit: no batch may exceed an owner's share, and the policy loss cannot
    use trajectories that are older than the batches in flight.

    Args:
        places: places of the turns that can be trained.
        join: forms trajectories from a subset of these places.
        owners: returns the owners of a trajectory and its loss.
    """
    left = places
    while True:
        parts = join(left)
        if len(parts) == 1:
            return parts
        bounds = InFlightBounds.of(job)
        fitting = [part for part in parts if bounds.try_add([owners(part)])]
        if len(fitting) == len(parts):
            return parts
        left = sorted(place for part in fitting for place in part)
