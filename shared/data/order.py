"""Order of training rows: a pure function from ordinal to row, so that any process can resume anywhere.

The number of ordinals in an epoch is the total number of rows of all sources. Each source gets a share of the ordinals
by its weight, evenly spaced. It iterates over its own rows pass after pass, each pass in a new permutation, and
continues in the next epoch where it stopped. With one source, an epoch is therefore exactly one pass.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.shared.config.data import DataConfig
from penstock.shared.data.rows import Rows
from penstock.shared.data.user_code import import_named
from penstock.shared.errors import DataError

__all__ = ["DataOrder", "Place", "apportion", "permutation", "rank_of"]

_EPOCHS_KEPT = 3


class Place(NamedTuple):
    """Row to which an ordinal maps: epoch, number of the source, and index in the source."""

    epoch: int
    source: int
    row: int


class DataOrder:
    """Maps ordinals to rows. Stateless: equal (config, rows, seed) give equal results in any process."""

    def __init__(self, config: DataConfig, rows: Sequence[Rows], seed: int) -> None:
        """Prepare the order of the rows of all training sources.

        Args:
            config: weights of `train`, `shuffle` and `curriculum` are used.
            rows: the opened `config.train`, in order.
            seed: of the job.

        Raises:
            DataError: the curriculum function cannot be loaded.
        """
        self._rows = rows
        self._seed = seed
        self._shuffle = config.shuffle
        self._rank = None
        if config.curriculum:
            where = "rollout and trainer"
            self._rank = import_named(config.curriculum, what="data.curriculum:", beside=where, error=DataError)
        self._counts = apportion([s.weight for s in config.train], sum(len(r) for r in rows))
        self._source_P, self._nth_P = _interleave(self._counts)
        self._epochs: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = OrderedDict()

    @property
    def rows_per_epoch(self) -> int:
        """Number of ordinals in one epoch."""
        return len(self._source_P)

    def __call__(self, ordinal: int) -> Place:
        """Return the row at position ``ordinal`` (from 0) of the data order."""
        if ordinal < 0:
            raise ValueError(f"ordinal {ordinal} is negative")
        epoch, place = divmod(ordinal, self.rows_per_epoch)
        source_P, row_P = self._epoch(epoch)
        return Place(epoch, int(source_P[place]), int(row_P[place]))

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self._epochs.get(epoch)
        if found is None:
            found = self._epochs[epoch] = self._make_epoch(epoch)
            if len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return found

    def _make_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source and the row at each position of an epoch, as two arrays int64 [P]."""
        row_P = np.empty(self.rows_per_epoch, np.int64)
        for source, count in enumerate(self._counts):
            of_source = self._source_P == source
            row_P[of_source] = self._walk(source, epoch * count + self._nth_P[of_source])
        if self._rank is None:
            return self._source_P, row_P
        rank_P = [self._rank_of(int(s), int(r)) for s, r in zip(self._source_P, row_P, strict=True)]
        order_P = np.argsort(np.asarray(rank_P, np.float64), kind="stable")
        return self._source_P[order_P], row_P[order_P]

    def _walk(self, source: int, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert ``steps``, which are positions in the order of a source, to row indices. After its last row a finite
        source starts again, while an endless source gives further rows; with `shuffle`, each pass has another order."""
        size = len(self._rows[source])
        passes, indices = np.divmod(steps, size)
        if self._shuffle:
            for number in np.unique(passes):
                inside = passes == number
                indices[inside] = permutation(size, f"{self._seed}:{source}:{number}")[indices[inside]]
        return indices + passes * size if self._rows[source].endless else indices

    def _rank_of(self, source: int, row: int) -> float:
        assert self._rank is not None
        rows = self._rows[source]
        return rank_of(self._rank, rows[row], rows.where(row))


def rank_of(rank: Callable[[dict[str, Any]], object], row: dict[str, Any], where: str) -> float:
    """Return the rank of a row, computed by the user's function ``rank``. Exceptions of the function propagate.

    Raises:
        DataError: the function returned no number.
    """
    value = rank(row)
    if not isinstance(value, int | float) or math.isnan(value):
        raise DataError(f"{where}: data.curriculum returned {value!r}; it must return a number")
    return float(value)


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Split ``total`` into integers in proportion to ``weights`` by the largest remainder method. Their sum is
    ``total``, and each differs from its exact share by less than 1."""
    quotas = [total * w / sum(weights) for w in weights]
    counts = [math.floor(q) for q in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def permutation(size: int, key: str) -> NDArray[np.int64]:
    """Return a permutation of ``range(size)`` that depends only on ``key``.

    It sorts raw output of the generator, which NumPy keeps stable across versions, unlike ``Generator.permutation``.
    """
    keys = np.random.PCG64(xxhash.xxh3_128_intdigest(key.encode())).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def _interleave(counts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Interleave the rows of all sources evenly. Return, for each position of the mixture, the source and the number of
    the row in the source, int64 [P] each; both are empty for an online job, which has no source."""
    if not counts:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    source_P = np.concatenate([np.full(n, s, np.int64) for s, n in enumerate(counts)])
    nth_P = np.concatenate([np.arange(n, dtype=np.int64) for n in counts])
    time_P = (nth_P + 0.5) / np.asarray(counts, np.float64)[source_P]
    order_P = np.lexsort((source_P, time_P))
    return source_P[order_P], nth_P[order_P]
