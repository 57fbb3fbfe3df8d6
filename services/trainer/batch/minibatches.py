"""Minibatches of an update: the microbatches that each rank computes, and the denominators of their losses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.services.trainer.batch.facts import BatchFacts
from penstock.services.trainer.batch.packing import Columns, Ints, Microbatch, microbatches
from penstock.services.trainer.ranks.collective import Collective

__all__ = ["Minibatch", "minibatches"]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Inputs of one optimizer step.

    Attributes:
        microbatches: microbatches of this rank, padded with None to the largest number on any rank, so that all ranks
            take part equally often.
        num_tokens: number of scored tokens of the minibatch over all ranks, including skipped ones.
        num_sequences: number of sequences with a scored token over all ranks, including skipped ones.
    """

    microbatches: list[Microbatch | None]
    num_tokens: int
    num_sequences: int


def minibatches(
    columns: Columns,
    facts: BatchFacts,
    collective: Collective,
    *,
    number: int,
    max_tokens: int,
    skip_B: NDArray[np.bool_],
    excluded_B: NDArray[np.bool_],
    order_G: Ints | None = None,
) -> list[Minibatch]:
    """Split the batch into ``number`` contiguous, nearly equal runs of whole groups.

    Args:
        columns: columns of this rank's groups.
        skip_B: rows of the batch that are not packed but counted in the denominators.
        excluded_B: rows that are neither packed nor counted.
        order_G: order of the groups for the split; None: manifest order. Rows within a minibatch keep manifest order.
    """
    of_rows = facts.minibatch_of_rows(number, order_G)
    packed_B = ~(skip_B | excluded_B)[facts.own_B]
    own = [
        microbatches(columns, np.flatnonzero((of_rows[facts.own_B] == i) & packed_B), max_tokens) for i in range(number)
    ]
    most = collective.max({str(i): float(len(part)) for i, part in enumerate(own)})
    counts = [facts.scored_B[(of_rows == i) & ~excluded_B] for i in range(number)]
    return [
        Minibatch(
            microbatches=[*own[i], *[None] * (int(most[str(i)]) - len(own[i]))],
            num_tokens=int(counts[i].sum()),
            num_sequences=int((counts[i] > 0).sum()),
        )
        for i in range(number)
    ]
