"""What one owner may have of the draws in flight, and how much of an episode can be among them at all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from penstock.services.coordinator.online.batches import others_per_batch
from penstock.services.coordinator.online.shares import Owners, Shares
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.objective import Objective

__all__ = ["OVER_SHARE", "Bounds", "most_others", "within_bounds"]

OVER_SHARE = "over_share"
"""Why a turn is not trained: earlier ones of its episode are all that its owner may have in flight."""


def most_others(job: OnlineJob) -> int:
    """Draws that may be in flight for other losses than that of the policy."""
    return (job.train.max_lag + 1) * others_per_batch(job)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one owner may have of all draws in flight, and of those for other losses than that of the policy.

    There everybody may have one: what an update takes of such material may be less than one share.
    """

    all: Shares
    others: Shares

    @classmethod
    def of(cls, job: OnlineJob) -> Bounds:
        """Where nothing is in flight yet."""
        return cls(
            Shares(job.online, job.max_draws, strict=False), Shares(job.online, most_others(job), least=1, strict=False)
        )

    def count(self, owners: Owners, objective: Objective) -> None:
        """Somebody has one more, bounds or not."""
        self.all.count(owners)
        if objective != "policy":
            self.others.count(owners)

    def take(self, found: Sequence[tuple[Owners, Objective]]) -> bool:
        """Count these in, all of them or none; whether they were.

        Where several wait, nothing that comes later of whoever has too many passes them: they would wait for ever.
        """
        every, others = (
            [owners for owners, _ in found],
            [owners for owners, objective in found if objective != "policy"],
        )
        fits = self.all.holds(every) and self.others.holds(others)
        if fits:
            for owners, objective in found:
                self.count(owners, objective)
        elif len(found) > 1:
            self.all.bar(every)
            self.others.bar(others)
        return fits


def within_bounds(
    job: OnlineJob,
    places: Collection[int],
    join: Callable[[Collection[int]], list[list[int]]],
    owners: Callable[[Sequence[int]], tuple[Owners, Objective]],
) -> list[list[int]]:
    """Trajectories of an episode that fit into the bounds where nothing else is in flight, earlier ones first.

    They are admitted together. More would never be: no batch may hold more of an owner than their share, and what the
    policy loss learns from is too old after the batches that these bounds are of.

    Args:
        places: of the turns that can be trained.
        join: makes trajectories of some of these.
        owners: who stands behind a trajectory, and the loss that it is for.
    """
    left = places
    while True:
        parts = join(left)
        if len(parts) == 1:
            return parts
        bounds = Bounds.of(job)
        fitting = [part for part in parts if bounds.take([owners(part)])]
        if len(fitting) == len(parts):
            return parts
        left = sorted(place for part in fitting for place in part)
