"""Which rank trains which groups of a batch.

A pure function of sizes: every rank, and every replay, cuts the batch at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.shared.protocol.events import Hyperparameters
from penstock.shared.protocol.trajectory import Group

__all__ = ["BatchShard", "assign"]


@dataclass(frozen=True, slots=True)
class BatchShard:
    """The groups of a batch that one rank holds.

    Attributes:
        groups: in manifest order.
        positions: place of each in the batch, ascending.
        num_groups: groups of the whole batch.
        hyperparameters: those that the batch was sealed with; None: those of the job file.
    """

    groups: list[Group]
    positions: list[int]
    num_groups: int
    hyperparameters: Hyperparameters | None = None

    @classmethod
    def whole(cls, groups: Sequence[Group]) -> BatchShard:
        """The shard of a single rank: everything."""
        return cls(list(groups), list(range(len(groups))), len(groups))


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
