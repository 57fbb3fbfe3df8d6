"""Assignment of the groups of a batch to ranks.

A pure function of sizes: every rank, and every replay, divides a batch in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.protocol.events import Hyperparameters
from penstock.shared.protocol.objective import Objective
from penstock.shared.protocol.trajectory import Group

__all__ = ["AnyGroup", "BatchShard", "assign", "owners"]

AnyGroup = TypeVar("AnyGroup", Group, EpisodeGroup)
"""Kind of group: completions of a language model, or episodes in a simulator."""


@dataclass(frozen=True, slots=True)
class BatchShard(Generic[AnyGroup]):
    """The groups of a batch that one rank holds.

    Attributes:
        groups: in manifest order.
        positions: index of each group in the batch, ascending.
        num_groups: number of groups in the whole batch.
        hyperparameters: hyperparameters that the batch was sealed with; None: those of the job config.
        objectives: objective of every group of the whole batch; empty: all use the policy loss.
        baselines: sealed baseline of every group of the whole batch; empty: none.
        weights: advantage factor of every group of the whole batch; empty: 1.
        start_version: policy version that the batch trains; None: unknown, and every token counts as sampled
            by the version in training.
    """

    groups: list[AnyGroup]
    positions: list[int]
    num_groups: int
    hyperparameters: Hyperparameters | None = None
    objectives: tuple[Objective, ...] = ()
    baselines: tuple[float | None, ...] = ()
    weights: tuple[float, ...] = ()
    start_version: int | None = None

    @classmethod
    def whole(cls, groups: Sequence[AnyGroup]) -> BatchShard[AnyGroup]:
        """Return the shard of a single rank, with all groups."""
        objectives = tuple(group.objective for group in groups)
        return cls(list(groups), list(range(len(groups))), len(groups), objectives=objectives)

    def of(self, objective: Objective) -> BatchShard[AnyGroup]:
        """Return this rank's groups with the objective ``objective`` as a shard of their own. In it, ``positions`` and
        ``num_groups`` count only the groups of the batch with this objective."""
        every = self.objectives or ("policy",) * self.num_groups
        mine = [position for position, one in enumerate(every) if one == objective]
        places = {position: place for place, position in enumerate(mine)}
        own = [(group, places[at]) for group, at in zip(self.groups, self.positions, strict=True) if at in places]
        return BatchShard(
            [group for group, _ in own], [at for _, at in own], len(mine), self.hyperparameters,
            baselines=tuple(self.baselines[at] for at in mine) if self.baselines else (),
            weights=tuple(self.weights[at] for at in mine) if self.weights else (),
            start_version=self.start_version,
        )  # fmt: skip


def owners(
    group_tokens: Sequence[int], objectives: Sequence[Objective], *, minibatches: int, ranks: int
) -> NDArray[np.int64]:
    """Return the rank of each group, int64 [groups].

    Calls ``assign`` for the groups of each objective separately, because each objective has its own loss.
    """
    owner = np.zeros(len(group_tokens), np.int64)
    tokens, kinds = np.asarray(group_tokens, np.int64), np.array(objectives, np.str_)
    for objective in dict.fromkeys(objectives):
        places = np.flatnonzero(kinds == objective)
        owner[places] = assign(tokens[places].tolist(), minibatches=minibatches, ranks=ranks)
    return owner


def assign(group_tokens: Sequence[int], *, minibatches: int, ranks: int) -> NDArray[np.int64]:
    """Return the rank of each group, so that the ranks have about the same number of tokens in every minibatch.

    Assigns the longest group first to the rank with the least tokens (Graham, 1969: at most 4/3 of the best makespan).
    A group is never split.

    Args:
        group_tokens: tokens of each group in manifest order, prompts counted once per trajectory.
        minibatches: number of contiguous runs of groups into which the batch is split, as in
            ``minibatches.minibatches``.

    Returns:
        int64 [groups].
    """
    owner = np.zeros(len(group_tokens), np.int64)
    tokens = np.asarray(group_tokens, np.int64)
    for groups in np.array_split(np.arange(len(tokens)), minibatches):
        load = np.zeros(ranks, np.int64)
        for group in groups[np.argsort(-tokens[groups], kind="stable")]:
            owner[group] = load.argmin()
            load[owner[group]] += tokens[group]
    return owner
