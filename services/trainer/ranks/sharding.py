"""Which rank trains which groups of a batch.

A pure function of sizes: every rank, and every replay, cuts the batch at the same places.
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
"""Completions of a language model, or episodes in a simulator."""


@dataclass(frozen=True, slots=True)
class BatchShard(Generic[AnyGroup]):
    """The groups of a batch that one rank holds.

    Attributes:
        groups: in manifest order.
        positions: place of each in the batch, ascending.
        num_groups: groups of the whole batch.
        hyperparameters: those that the batch was sealed with; None: those of the job file.
        objectives: of every group of the whole batch; empty: all are for the policy loss.
        baselines: values that the batch was sealed with, of every group of it; empty: there are none.
        weights: factors of the advantages of every group of it; empty: 1.
        start_version: that the batch trains; None: every token counts as one of it.
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
        """The shard of a single rank: everything."""
        objectives = tuple(group.objective for group in groups)
        return cls(list(groups), list(range(len(groups))), len(groups), objectives=objectives)

    def of(self, objective: Objective) -> BatchShard[AnyGroup]:
        """The groups of one objective as a batch of their own, the same cut on every rank."""
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
    """Rank of each group, int64 [groups]: ``assign`` for each objective by itself, as their losses are computed."""
    owner = np.zeros(len(group_tokens), np.int64)
    tokens, kinds = np.asarray(group_tokens, np.int64), np.array(objectives, np.str_)
    for objective in dict.fromkeys(objectives):
        places = np.flatnonzero(kinds == objective)
        owner[places] = assign(tokens[places].tolist(), minibatches=minibatches, ranks=ranks)
    return owner


def assign(group_tokens: Sequence[int], *, minibatches: int, ranks: int) -> NDArray[np.int64]:
    """Rank of each group, so that the ranks of every minibatch have about the same number of tokens.

    Longest first to the rank that has least (Graham, 1969: at most 4/3 of the best makespan). A group is never split.

    Args:
        group_tokens: tokens of each group, prompts once per trajectory included, in manifest order.
        minibatches: the batch is cut into this many contiguous runs of groups, as ``packing.minibatches`` does.

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
