"""Limits the shares of a batch that API keys and users may have, and weighs new sources of feedback. Pure.

A share is the part of a batch, or of the draws in flight, that one API key or user may have. The weight of a new source
depends on its agreement with the job's reference keys.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.services.coordinator.online.admission import MASKED, arrival_order, reward_of_value
from penstock.shared.algorithms.agreement import Paired, add_pairs, concordance
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.online.section import OnlineConfig
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event
from penstock.shared.protocol.live.interaction import Feedback
from penstock.shared.protocol.objective import Objective

__all__ = [
    "OVER_SHARE",
    "InFlightBounds",
    "OwnerShares",
    "Owners",
    "auxiliary_per_batch",
    "comparisons",
    "flaws_of_shares",
    "flaws_of_weights",
    "has_several_owners",
    "max_auxiliary_in_flight",
    "owners_of",
    "share_limits",
    "weight_of",
    "within_bounds",
]

WITHOUT_SOURCE = ("default", "invalid")
"""Reasons of rewards that no source of feedback determined: the default of a metric, or the reward of an invalid
answer."""


def comparisons(job: OnlineJob, items: Iterable[Feedback]) -> list[tuple[str, float, float]]:
    """Pair each judgment by a feedback source (an API key) with those by the reference keys, the API keys that the job
    trusts. Return ``(source, its reward, mean reward of the reference keys)`` for each pair.

    A source's judgment is left out if no reference key judged the same metric of the same target. Only the newest item
    of each key counts.
    """
    config = job.online.new_sources
    if config is None:
        return []
    by_target: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for item in sorted(items, key=arrival_order):
        metric = job.online.metric(item.metric)
        if metric is not None:
            by_target[item.inference or item.episode, item.metric][item.key_id] = reward_of_value(item.value, metric)
    pairs = []
    for values in by_target.values():
        trusted = [value for key, value in values.items() if key in config.reference_keys]
        if trusted:
            mean = sum(trusted) / len(trusted)
            pairs += [(key, value, mean) for key, value in values.items() if key not in config.reference_keys]
    return sorted(pairs)


def weight_of(job: OnlineJob, agreements: Mapping[str, Paired], judges: Sequence[str], reason: str) -> float:
    """Return the factor for the advantages of a trajectory: 0 if its tokens are masked, `new_sources.weight` if a
    judging API key is new, otherwise 1.

    One new judge suffices, because each judge contributes to the reward.
    """
    config = job.online.new_sources
    if reason in MASKED:
        return 0.0
    if config is None or reason in WITHOUT_SOURCE:
        return 1.0
    for judge in judges:
        paired = agreements.get(judge)
        known = paired is not None and paired[0] >= config.items and concordance(paired) >= config.agreement
        if not known and judge not in config.reference_keys:
            return config.weight
    return 1.0


def flaws_of_weights(
    entries: Iterable[Iterable[Event]], trained: Mapping[int, BatchSealed], job: OnlineJob
) -> list[str]:
    """Describe admissions whose weight does not follow from earlier feedback, and groups whose weight differs from that
    of their admission."""
    flaws: list[str] = []
    agreements: dict[str, Paired] = {}
    admissions: dict[int, Admission] = {}
    for event in (event for entry in entries for event in entry if isinstance(event, Admitted)):
        for one in event.admissions:
            policy = one.objective == "policy" and bool(one.interactions)
            expected = weight_of(job, agreements, one.judges, one.reason) if policy else 1.0
            expected *= one.share or 1.0
            if one.weight != expected:
                flaws.append(f"ordinal {one.ordinal}: admitted with weight {one.weight:g}, not {expected:g}")
            admissions[one.ordinal] = one
        agreements = add_pairs(agreements, (pair for one in event.admissions for pair in one.compared))
    for number, batch in trained.items():
        for group in batch.groups:
            admission = admissions.get(group.draw.ordinal)
            if admission is not None and group.weight != admission.weight:
                flaws.append(f"batch {number}: draw {group.draw} has weight {group.weight:g}, not {admission.weight:g}")
    return flaws


OVER_SHARE = "over_share"
"""Reason of a turn that is not trained because earlier turns of its episode use up its owner's share."""


class Owners(NamedTuple):
    """API keys and users that own a trajectory, so that it counts towards their shares.

    ``judges`` are the API keys whose feedback determines the reward. Without feedback they are the keys that sent the
    requests, because the reward then follows from the absence of their feedback. ``askers`` are the keys that received
    the answers, ``users`` the users of the conversations.
    """

    judges: tuple[str, ...]
    askers: tuple[str, ...]
    users: tuple[str, ...]


def owners_of(admission: Admission) -> Owners:
    """Return the owners of an admitted trajectory.

    An empty list of judges or users means ``key_id`` or ``user``; an empty list of askers means the judges. In ledgers
    of earlier versions, which have no list of judges, ``key_id`` is the newest judge.
    """
    judges = admission.judges or [admission.key_id]
    users = admission.users or [admission.user]
    return Owners(tuple(judges), tuple(admission.askers or judges), tuple(users))


def share_limits(online: OnlineConfig) -> tuple[float, float, float]:
    """Return the largest share of a batch that one owner may have, for each kind of owner in the order of
    ``Owners``."""
    return online.max_share_per_key, online.max_share_per_asker, online.max_share_per_user


class OwnerShares:
    """Counts trajectories by owner, and refuses a trajectory that would exceed an owner's share of ``size``
    trajectories.

    Args:
        least: number of trajectories that every owner may have, however small the share is.
        strict: True: a share of 1 limits an owner to ``size``; False: it sets no limit.
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
        """Count all ``trajectories`` and return True; if an owner would exceed a share, count none and return False."""
        if not self.fits(trajectories):
            return False
        for owners in trajectories:
            self.add(owners)
        return True

    def block(self, trajectories: Sequence[Owners]) -> None:
        """If ``trajectories`` would exceed the share of an owner, refuse all further trajectories of this owner."""
        for place, (most, taken) in enumerate(self._bounds):
            new = Counter(name for owners in trajectories for name in owners[place])
            taken.update({name: math.ceil(most) for name, count in new.items() if taken[name] + count > most})

    def fits(self, trajectories: Sequence[Owners]) -> bool:
        """Return True if ``try_add`` would count ``trajectories``."""
        if not trajectories:
            return True
        for place, (most, taken) in enumerate(self._bounds):
            first = trajectories[0][place]
            if any(taken[name] + 1 > most for name in first):  # a fast check that refuses most trajectories of a flood
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
    """Return True if ``batch`` has at least two owners of each kind for which the job limits the share of one owner.
    The kinds are judging keys, asking keys and users; see ``Owners``."""
    bounded = (place for place, share in enumerate(share_limits(online)) if share < 1)
    return all(len({name for owners in batch for name in owners[place]}) > 1 for place in bounded)


def auxiliary_per_batch(job: OnlineJob) -> int:
    """Return the largest number of groups of one update that train auxiliary losses (all losses but the policy
    loss)."""
    off_policy = job.online.off_policy
    return max(1, int(off_policy.max_share * job.groups_per_batch)) if off_policy is not None else 0


def max_auxiliary_in_flight(job: OnlineJob) -> int:
    """Return the largest number of draws in flight for auxiliary losses (all losses but the policy loss)."""
    return (job.train.max_lag + 1) * auxiliary_per_batch(job)


@dataclass(frozen=True, slots=True)
class InFlightBounds:
    """Limits for the draws in flight of each owner: one limit for all draws, and one for draws of auxiliary losses (all
    but the policy loss).

    Every owner may have one auxiliary draw: an update takes so few that an owner's share of them may be below one.
    """

    all: OwnerShares
    auxiliary: OwnerShares

    @classmethod
    def of(cls, job: OnlineJob) -> InFlightBounds:
        """Create the bounds of a job; no draw is counted yet."""
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
        """Count all trajectories in ``found`` and return True; if they do not all fit, count none and return False.

        If several trajectories that belong together do not fit, later trajectories of the owners at their limit are
        refused, too: otherwise the later ones could take every free slot, and those that belong together would never
        fit.
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
    """Return those trajectories of an episode (each as the positions of its turns) that may be in flight together.

    Owners are assumed to have no other draws in flight; earlier trajectories have priority. More trajectories would
    never fit: no batch may exceed an owner's share, and the policy loss cannot train trajectories that are older than
    the batches in flight.

    Args:
        places: positions in the episode of the turns that can be trained on.
        join: forms trajectories from a subset of these positions.
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
