"""What an audit checks of an online job: every trained trajectory was admitted, and nothing counted twice. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from penstock.services.coordinator.online.shares import over_share, owners_of
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event

__all__ = ["flaws_of_admission"]


def flaws_of_admission(
    entries: Sequence[Sequence[Event]], trained: Mapping[int, BatchSealed], job: OnlineJob
) -> tuple[int, list[str]]:
    """``(admissions, flaws)`` of the ledger of an online job; ``trained`` are the batches of its lineage.

    An interaction is admitted once and with one ordinal for good; an item of feedback counts once; a trained group has
    the reward and the objective of its admission, which, for the policy loss, was within the lag bound when it was
    made; nobody had more than their share of a batch.
    """
    max_lag, events = job.train.max_lag, [event for entry in entries for event in entry]
    admissions = [one for event in events if isinstance(event, Admitted) for one in event.admissions]
    flaws = [
        f"ordinal {one.ordinal}: admitted with lag {one.lag} > {max_lag}"
        for one in admissions
        if one.objective == "policy" and one.lag > max_lag
    ]
    flaws += [f"ordinal {one.ordinal}: no source" for one in admissions if not (one.interactions or one.feedback)]
    flaws += _twice("interaction", (name for one in admissions for name in one.interactions))
    flaws += _twice("feedback", (name for one in admissions for name in one.feedback))
    by_ordinal = {one.ordinal: one for one in admissions}
    return len(admissions), flaws + _unlike(trained, by_ordinal) + _unfair(trained, by_ordinal, job)


def _twice(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what} {name} was admitted {count} times" for name, count in Counter(names).items() if count > 1]


def _unlike(trained: Mapping[int, BatchSealed], admissions: Mapping[int, Admission]) -> list[str]:
    flaws = []
    for number, batch in trained.items():
        for group in batch.groups:
            admission = admissions.get(group.draw.ordinal)
            if admission is None:
                flaws.append(f"batch {number}: draw {group.draw} was trained without an admission")
            elif group.objective != admission.objective:
                flaws.append(f"batch {number}: draw {group.draw} is {group.objective}, admitted {admission.objective}")
            elif any(abs(reward - admission.reward) > 1e-4 * max(1.0, abs(reward)) for reward in group.rewards):
                flaws.append(f"batch {number}: draw {group.draw} has reward {group.rewards}, not {admission.reward:g}")
    return flaws


def _unfair(trained: Mapping[int, BatchSealed], admissions: Mapping[int, Admission], job: OnlineJob) -> list[str]:
    flaws = []
    for number, batch in trained.items():
        found = [admissions.get(group.draw.ordinal) for group in batch.groups]
        owners = [owners_of(admission) for admission in found if admission is not None]
        flaws += [f"batch {number}: {text}" for text in over_share(job.online, owners)]
    return flaws
