"""The on-policy gate: decides on groups by their headers alone. Pure.

The lag of a group is (policy version at the start of the update that trains it) − (oldest version in its spans).
``max_lag`` bounds it; 0 is strictly on-policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.services.coordinator.training.ledger import LedgerState, OpenDraw
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.protocol.events import SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import GroupHeader

__all__ = ["Candidate", "Verdict", "choose", "has_signal", "is_stale", "judge"]

MAX_REDRAWS = 4
"""Maximum number of redraws of an ordinal: a prompt that always fails must not stop the run."""


class Verdict(StrEnum):
    """Decision on a group that arrived."""

    ACCEPT = "accept"
    """The group may be trained."""
    DUPLICATE = "duplicate"
    """The draw has a group already, or is no longer open; the new group is deleted at once, and the ledger does not
    count it."""
    SKIPPED = "skipped"
    """The worker refused the prompt; the draw is dropped with the worker's reason, and not drawn again."""
    FAILED = "failed"
    """Too few trajectories have a score, or the baseline has none; the draw is dropped and drawn again."""
    NOT_FINITE = "not_finite"
    """A log-prob or reward is not finite; the draw is dropped and drawn again."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that arrived and is not committed yet: its position in the stream, its header, the verdict.

    ``oldest`` is the version that its lag counts from, ``newest`` the highest version in its spans. For losses other
    than the policy loss, which have no lag bound, they are plus and minus infinity. ``entry`` represents the group in
    a batch. All three are computed on arrival, because a batch may have thousands of groups.
    """

    seq: int
    header: GroupHeader
    verdict: Verdict
    oldest: float = field(init=False)
    newest: float = field(init=False)
    entry: SealedGroup = field(init=False)

    def __post_init__(self) -> None:
        header = self.header
        entry = SealedGroup(
            draw=header.draw,
            attempt=header.attempt,
            seq=self.seq,
            digest=header.digest,
            min_version=header.min_version,
            max_version=header.max_version,
            rewards=header.rewards,
            tokens=sum(header.lengths),
            worker=header.worker,
            objective=header.objective,
            temperature=header.temperature,
            nbytes=header.nbytes,
        )
        object.__setattr__(self, "entry", entry)
        is_policy = header.objective == "policy"
        object.__setattr__(self, "oldest", header.min_version if is_policy else math.inf)
        object.__setattr__(self, "newest", header.max_version if is_policy else -math.inf)

    @property
    def messages(self) -> range:
        """Stream sequence numbers of the messages that contain the group."""
        return range(self.seq, self.seq + self.header.num_messages)

    def is_stale(self, start_version: int, max_lag: int) -> bool:
        """Return True if an update that starts from ``start_version`` may not train the group."""
        return is_stale(self.oldest, start_version, max_lag)

    def has_wrong_weights(self, state: LedgerState) -> bool:
        """Return True if the digest of the weights that sampled the group contradicts the ledger, or if their version
        is not in the ledger.

        A trainer that died before its update was recorded may have published those weights to engines, and its
        successor's update can differ in bits. Groups of earlier releases do not name their weights.
        """
        weights = self.header.weights
        return self.newest > state.version or (bool(weights) and state.made_by_others(weights))

    @property
    def mean_length(self) -> int:
        """Mean completion length in tokens."""
        lengths = self.header.lengths
        return round(sum(lengths) / len(lengths)) if lengths else 0


def judge(
    header: GroupHeader, info: OpenDraw | None, *, taken: bool, smallest_group: int, needs_baseline: bool = False
) -> Verdict:
    """Return the verdict on a group that arrived, by its header.

    ``info``: the group's draw in the ledger, None if the draw is not open; ``taken``: the draw has a group already.
    ``smallest_group`` counts sampled completions; with ``needs_baseline`` the greedy completion needs a reward, too.
    """
    if info is None or info.batch or taken:
        return Verdict.DUPLICATE
    if header.skipped:
        return Verdict.SKIPPED
    if not header.finite:
        return Verdict.NOT_FINITE
    if needs_baseline and header.baseline is None:
        return Verdict.FAILED
    return Verdict.ACCEPT if len(header.counted) >= smallest_group else Verdict.FAILED


def has_signal(header: GroupHeader, *, has_success: bool) -> bool:
    """Return True if a group can teach something by comparing its trajectories.

    The rewards must differ. ``has_success``: the job's simulator reports success. Then some episodes must also succeed
    and others not, because dense returns hardly ever coincide; groups of earlier versions do not say which succeeded.
    """
    if has_success and header.succeeded and len({header.succeeded[i] for i in header.counted}) < 2:
        return False
    return header.has_signal


def is_stale(min_version: float, start_version: int, max_lag: int) -> bool:
    """Return True if an update from ``start_version`` may not train a group whose oldest version is ``min_version``."""
    return start_version - min_version > max_lag


def choose(
    config: AnyTraining,
    state: LedgerState,
    acceptable: Mapping[Draw, Candidate],
    *,
    ready: Sequence[Draw],
    oldest_missing: float,
) -> list[Draw] | None:
    """Return the draws of the next batch, in training order, or None if the batch cannot be sealed yet.

    ``ready`` are the acceptable candidates that are not stale, in order of arrival; ``oldest_missing`` is the lowest
    ``min_version`` of the draws in flight that have no group, infinity without such draws.

    - ``in_order``: the batch is the lowest open draws; wait until all of them have arrived.
    - ``drop``: first come, first trained; groups that become stale are dropped later.
    - ``wait``: first come, first trained, but groups that the *next* update could no longer train go first, and a draw
      in flight that the next update could no longer train is waited for (its deadline bounds the wait).
    """
    size = config.groups_per_batch
    if config.train.staleness == "in_order":
        first = state.in_flight[:size]
        return first if len(first) == size and set(first) <= set(ready) else None
    if len(ready) < size:
        return None
    urgent_below = state.start_version(state.next_number) + 1 - config.train.max_lag
    urgent = [draw for draw in ready if acceptable[draw].oldest < urgent_below]
    # A missing draw must fit into this very batch: wait for it only while the urgent groups leave room.
    if config.train.staleness == "wait" and len(urgent) < size and oldest_missing < urgent_below:
        return None
    if urgent and len(urgent) < len(ready):
        sooner = set(urgent)
        return sorted([*urgent, *(draw for draw in ready if draw not in sooner)][:size])
    return sorted(ready[:size])
