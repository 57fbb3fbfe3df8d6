"""Which admitted draws of an online job make a batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.services.coordinator.decision import Draft
from penstock.services.coordinator.online.shares import Shares, owners_of, several
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.ids import Draw

__all__ = ["ASSUMED", "batch_of", "others_per_batch", "within_shares"]

ASSUMED = "assumed"
"""Reason of an admission whose sampler is not known, and taken for the newest policy."""
SMALLEST = 2
"""A batch of one has nothing to be compared with."""


def others_per_batch(job: OnlineJob) -> int:
    """Most groups of an update that are not for the policy loss."""
    off_policy = job.online.off_policy
    return max(1, int(off_policy.max_share * job.groups_per_batch)) if off_policy is not None else 0


def batch_of(job: OnlineJob, draft: Draft, ready: Sequence[Draw]) -> list[Draw]:
    """The next batch; [] where it is not time for one.

    It is full with `train.batch_size` groups for the policy loss. A smaller one is trained once the oldest group has
    waited `online.max_wait_s`; where shares are bounded, the oldest ones of two owners, or what one of them has beyond
    its share would make every batch a small one. What is for other losses goes with it, and makes a batch of its own
    where nothing is for the policy loss, or what there is has to wait and does not become too old by it; not where a
    promotion gate bounds what only that loss measures.
    """
    admissions, limit = draft.state.admissions, others_per_batch(job)
    policy = [draw for draw in ready if admissions[draw.ordinal].objective == "policy"]
    others = sorted(set(ready) - set(policy))
    times = ((draft.now - admissions[draw.ordinal].time, admissions[draw.ordinal]) for draw in ready)
    waited = [owners_of(admission) for age_s, admission in times if age_s >= job.online.max_wait_s]
    due = bool(waited) and several(job.online, waited)
    own = _own(job, draft, policy, due=due)
    alone = job.online.promotion is None and (due or (not policy and len(others) >= limit))
    if not own and not (alone and _can_wait(job, draft, policy)):
        return []
    shares = Shares(job.online, limit, least=1)
    others = [draw for draw in others if shares.take([owners_of(admissions[draw.ordinal])])]
    size = len(own) + min(limit, len(others))
    return sorted(within_shares(job, [*own, *others], admissions, size, least=max(1, len(own))))


def _can_wait(job: OnlineJob, draft: Draft, policy: Sequence[Draw]) -> bool:
    """Whether all of these may still be trained after one more version."""
    next_start = draft.state.start_version(draft.state.next_number) + 1
    return not any(draft.candidates[draw].is_stale(next_start, job.train.max_lag) for draw in policy)


def _own(job: OnlineJob, draft: Draft, policy: Sequence[Draw], *, due: bool) -> list[Draw]:
    """The part for the policy loss, the oldest policy first."""
    size, admissions = job.groups_per_batch, draft.state.admissions
    ordered = sorted(policy, key=lambda draw: (draft.candidates[draw].header.min_version, draw))
    assumed = [draw for draw in ordered if admissions[draw.ordinal].reason == ASSUMED]
    left = set(assumed[int(job.online.posted.max_assumed_share * size) :])
    ordered = [draw for draw in ordered if draw not in left]
    if len(ordered) < size and not due:
        return []
    chosen = within_shares(job, ordered, admissions, size, least=1 if due else size)
    enough = len(chosen) >= (max(SMALLEST, job.train.minibatches) if due else size)
    return chosen if enough else []


def within_shares(
    job: OnlineJob, ordered: Sequence[Draw], admissions: Mapping[int, Admission], size: int, *, least: int = 1
) -> list[Draw]:
    """The longest batch of ``least`` to ``size`` in which nobody has more than their share, earlier draws first."""
    owners = {draw: owners_of(admissions[draw.ordinal]) for draw in ordered}
    for target in range(min(size, len(ordered)), least - 1, -1):
        shares = Shares(job.online, target)
        chosen: list[Draw] = []
        for draw in ordered:
            if shares.take([owners[draw]]):
                chosen.append(draw)
            if len(chosen) == target:
                return chosen
    return []
