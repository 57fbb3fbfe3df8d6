"""Weighs new sources of feedback by their agreement with the job's reference keys. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from penstock.services.coordinator.online.admission import MASKED, arrival_order, reward_of_value
from penstock.shared.algorithms.agreement import Paired, add_pairs, concordance
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event
from penstock.shared.protocol.live.interaction import Feedback

__all__ = ["comparisons", "flaws_of_weights", "weight_of"]

WITHOUT_SOURCE = ("default", "invalid")
"""Reasons of rewards without a source. A return with the feedback of others in it is not `invalid`."""


def comparisons(job: OnlineJob, items: Iterable[Feedback]) -> list[tuple[str, float, float]]:
    """Return ``(source, its value, mean of the reference keys)`` for each metric and target that both judged, in
    rewards.

    Only the newest item of each key counts.
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
    """Return the factor of a trajectory's advantages: below 1 if one of its judges is a new source, 0 if it is masked.

    One new judge suffices, because each of them has a part of the reward.
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
    """Find the weights that do not follow from the feedback before them, and the groups trained with other weights."""
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
