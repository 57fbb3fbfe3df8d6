"""What new sources of feedback count for, and how they become known ones. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from penstock.services.coordinator.online.admission import MASKED, age, worth_of
from penstock.shared.algorithms.agreement import Paired, add_pairs, concordance
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event
from penstock.shared.protocol.interaction import Feedback

__all__ = ["comparisons", "flaws_of_weights", "weight_of"]

RULED = ("default", "invalid")
"""Reasons of rewards that no source decided. A return in which others have their part is not `invalid` (Episode)."""


def comparisons(job: OnlineJob, items: Iterable[Feedback]) -> list[tuple[str, float, float]]:
    """``(source, what it said, what the reference keys said)`` of the same metric of the same target, in rewards.

    The newest word of each key counts, and the mean of the reference keys.
    """
    config = job.online.new_sources
    if config is None:
        return []
    said: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for item in sorted(items, key=age):
        metric = job.online.metric(item.metric)
        if metric is not None:
            said[item.inference or item.episode, item.metric][item.key_id] = worth_of(item.value, metric)
    pairs = []
    for values in said.values():
        trusted = [value for key, value in values.items() if key in config.reference_keys]
        if trusted:
            mean = sum(trusted) / len(trusted)
            pairs += [(key, value, mean) for key, value in values.items() if key not in config.reference_keys]
    return sorted(pairs)


def weight_of(job: OnlineJob, agreements: Mapping[str, Paired], judges: Sequence[str], reason: str) -> float:
    """Factor of the advantages of a trajectory: that of a new source where one of its judges is new; 0: it is masked.

    Any new one, for each of them has its part of the reward.
    """
    config = job.online.new_sources
    if reason in MASKED:
        return 0.0
    if config is None or reason in RULED:
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
    """What an audit finds: weights that do not follow from what was said before, and groups trained with others."""
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
