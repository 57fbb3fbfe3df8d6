"""Properties of the whole batch, which every rank gathers so that results do not depend on the number of ranks.

Rows are in manifest order, whichever rank holds them. Per-token arrays over the batch hold the scored tokens of one row
after the other.

Shape legend: B = valid trajectories of the batch, G = groups of the batch, N = scored tokens of the batch,
L = this rank's flat completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.services.trainer.batch.packing import Columns, Ints, concatenated_ranges
from penstock.services.trainer.ranks.collective import Collective, union
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.trajectory import Group

__all__ = ["BatchFacts", "gather_facts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Properties of all trajectories of a batch, and the positions of this rank's trajectories among them.

    Attributes:
        group_B: index of the group in the batch.
        rewards_B, scored_B, length_B, truncated_B, assumed_B, parts, baseline_G: as in ``Columns``, of the whole batch.
        own_B: index in the batch of each row of this rank's columns.
        counted: indices of this rank's scored tokens in its flat arrays [L], in row order.
        weight_G: float32, advantage factor of each group of the batch; 0: the group is in no loss.
    """

    group_B: Ints
    rewards_B: NDArray[np.float32]
    scored_B: Ints
    length_B: Ints
    truncated_B: NDArray[np.bool_]
    assumed_B: NDArray[np.bool_]
    parts: dict[str, NDArray[np.float32]]
    baseline_G: NDArray[np.float32]
    own_B: Ints
    counted: Ints
    num_groups: int
    num_failed: int
    weight_G: NDArray[np.float32]

    @property
    def cu_seqlens(self) -> Tensor:
        """Offsets, int64 [B + 1], that split the scored tokens of the batch into rows."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.scored_B)]))

    def minibatch_of_rows(self, number: int, order_G: Ints | None = None) -> Ints:
        """Return the index of the minibatch of each row, int64 [B].

        The minibatches are ``number`` contiguous, nearly equal runs of whole groups.

        ``order_G``: order of the groups; None: manifest order.
        """
        runs = np.array_split(np.arange(self.num_groups), number)
        minibatch_G = np.repeat(np.arange(number), [len(run) for run in runs])
        if order_G is not None:
            minibatch_G = minibatch_G[np.argsort(order_G)]  # index of each group in the order
        return minibatch_G[self.group_B]

    def over_batch(self, flat_L: Mapping[str, Tensor], collective: Collective) -> dict[str, Tensor]:
        """Return the values of the scored tokens of all ranks, [N], from every rank's flat arrays. A collective."""
        own = {name: values_L.numpy()[self.counted] for name, values_L in flat_L.items()}
        rows = collective.gather({"rows": self.own_B})
        order = np.concatenate([self._tokens_of(part["rows"]) for part in rows])
        joined = {}
        for name, parts in _by_name(collective.gather(own)).items():
            values = np.empty(len(order), parts.dtype)
            values[order] = parts
            joined[name] = torch.from_numpy(values)
        return joined

    def own_tokens(self, values_N: Tensor, num_flat: int) -> Tensor:
        """Return the values of this rank's tokens as a flat array, [L] with L = ``num_flat``; 0 for unscored tokens."""
        flat_L = torch.zeros(num_flat, dtype=values_N.dtype)
        flat_L[torch.from_numpy(self.counted)] = values_N[torch.from_numpy(self._tokens_of(self.own_B))]
        return flat_L

    def _tokens_of(self, rows: Ints) -> Ints:
        starts = np.cumsum(self.scored_B) - self.scored_B
        return concatenated_ranges(starts[rows], self.scored_B[rows])


def gather_facts(columns: Columns, shard: BatchShard[Group], collective: Collective) -> BatchFacts:
    """Return the properties of the whole batch, gathered from the ``columns`` of all ranks. A collective.

    Raises:
        ProtocolError: no trajectory of the batch is valid.
    """
    positions = np.array(shard.positions, np.int64)
    names = union(columns.parts, collective)
    missing = np.full(len(columns.group_B), np.nan, np.float32)
    ranks = collective.gather(
        {
            "group": positions[columns.group_B],
            "rewards": columns.rewards_B,
            "scored": columns.scored_B,
            "length": columns.length_B,
            "truncated": columns.truncated_B,
            "assumed": columns.assumed_B,
            "position": positions,
            "baseline": columns.baseline_G,
            "num_failed": np.array([columns.num_failed], np.int64),
            **{f"part.{name}": columns.parts.get(name, missing) for name in names},
        }
    )
    batch = _by_name(ranks)
    if not len(batch["group"]):
        raise ProtocolError(f"all {batch['num_failed'].sum()} trajectories of the batch failed: nothing to train on")
    order = np.argsort(batch["group"], kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    before = sum(len(part["group"]) for part in ranks[: collective.rank])
    return BatchFacts(
        group_B=batch["group"][order],
        rewards_B=batch["rewards"][order],
        scored_B=batch["scored"][order],
        length_B=batch["length"][order],
        truncated_B=batch["truncated"][order],
        assumed_B=batch["assumed"][order],
        parts={name: batch[f"part.{name}"][order] for name in names},
        baseline_G=batch["baseline"][np.argsort(batch["position"], kind="stable")],
        own_B=place[before : before + len(columns.group_B)],
        counted=columns.counted(),
        num_groups=shard.num_groups,
        num_failed=int(batch["num_failed"].sum()),
        weight_G=np.array(shard.weights or (1.0,) * shard.num_groups, np.float32),
    )


def _by_name(ranks: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in ranks]) for name in ranks[0]}
