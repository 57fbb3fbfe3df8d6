"""Computes the baselines of a batch from tracked values and siblings. Pure: a replay finds the same ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from penstock.services.coordinator.online.turns import episode_key
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.algorithms.baseline import EVERYTHING, Tracked, mean_without, sums_of, track, value_of
from penstock.shared.config.algorithm import ReinforcePPConfig, ValueTracker
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, BatchSealed, Tracking
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Interaction

__all__ = ["baselines_of", "bucket_of", "flaws_of_baselines", "origin_of", "siblings_of", "tracked_by"]

GROUP = "group_id"
"""Tag that groups the interactions and episodes of one task."""


def tracked_by(job: OnlineJob) -> ValueTracker | None:
    """Return how a job tracks values, or None."""
    return job.algorithm.baseline if isinstance(job.algorithm, ReinforcePPConfig) else None


def bucket_of(job: OnlineJob, tags: Mapping[str, str]) -> str:
    """Return the bucket of an interaction with these tags."""
    config = tracked_by(job)
    kind = tags.get(config.tag, EVERYTHING) if config is not None and config.tag is not None else EVERYTHING
    return kind if config is not None and kind in config.buckets else EVERYTHING


def siblings_of(job: OnlineJob, interaction: Interaction) -> str:
    """Return the name shared by answers that are compared with each other, or '' if the job compares none."""
    config = tracked_by(job)
    if config is None or not config.siblings:
        return ""
    named = interaction.tags.get(GROUP)
    return interaction.request if named is None else f"{interaction.key_id} {named}"


def origin_of(interaction: Interaction) -> list[str]:
    """Return episode and request: answers of one conversation are not compared with each other across turns."""
    return [episode_key(interaction), interaction.request]


def _sibling_baselines(found: Mapping[Draw, Admission]) -> dict[Draw, float]:
    """Return the baselines of draws that have siblings in the batch."""
    groups: defaultdict[str, list[Admission]] = defaultdict(list)
    episodes: defaultdict[tuple[str, str], list[Admission]] = defaultdict(list)
    for one in found.values():
        groups[one.group].append(one)
        if one.origin:
            episodes[one.group, one.origin[0]].append(one)
    baselines: dict[Draw, float] = {}
    for draw, one in found.items():
        if one.group:
            same = episodes[one.group, one.origin[0]] if one.origin else [one]  # a posted answer stands alone
            own = [other.reward for other in same if other is one or other.origin != one.origin]
            mean = mean_without([other.reward for other in groups[one.group]], own)
            if mean is not None:
                baselines[draw] = mean
    return baselines


def baselines_of(job: OnlineJob, state: LedgerState, chosen: Sequence[Draw]) -> tuple[dict[Draw, float], Tracking]:
    """Return ``(baseline of each draw, update of the tracked values)`` for the next sealed batch.

    Baselines depend on all earlier batches, those included that are sealed but not trained yet.
    """
    config = tracked_by(job)
    if config is None:
        return {}, Tracking()
    tracked: dict[str, Tracked] = dict(state.values)
    for number in sorted(number for number in state.sealed if number < state.next_number):
        before = state.sealed[number].tracking
        tracked |= track(tracked, before.rewards, keep=before.keep)
    found = {draw: state.admissions[draw.ordinal] for draw in chosen}
    policy = {draw: admission for draw, admission in found.items() if admission.objective == "policy"}
    baselines = {
        draw: value_of(tracked, admission.bucket, value=config.value, weight=config.weight)
        for draw, admission in policy.items()
    } | _sibling_baselines(policy)
    rewards = [(admission.bucket, admission.reward) for admission in policy.values()]
    return baselines, Tracking(sums_of(rewards), config.keep)


def flaws_of_baselines(job: OnlineJob, state: LedgerState, batch: BatchSealed) -> list[str]:
    """Compare a batch's baselines with those that follow from ``state``, the ledger before it."""
    baselines, tracking = baselines_of(job, state, [group.draw for group in batch.groups])
    sealed = {group.draw: group.baseline for group in batch.groups if group.baseline is not None}
    same = sealed == baselines and batch.tracking == tracking
    return [] if same else [f"batch {batch.number}: its baselines do not follow from the batches before it"]
