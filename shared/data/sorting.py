"""Generated sorting problems with answers of very different lengths, a pure function of seed and index."""

from __future__ import annotations

import random
from typing import Any

import xxhash

from penstock.shared.config.data import SORTING_SYMBOLS, SortingSource

__all__ = ["SortingRows"]

LONGEST_ASTRAY, END_ASTRAY = 63, 1 / 16
"""Maximum length of a corrupted answer in symbols, and its probability of ending after each random symbol."""
RAMBLING = SORTING_SYMBOLS[::-1]
"""Answer that is unrelated to its problem: all 64 symbols in reverse order. Each symbol determines the next, so a
policy that has learned this answer never ends it early."""


class SortingRows:
    """Row i is ``{"prompt": "b7Ka=", "answer": "7Kab", "items": 4}``: distinct symbols to sort."""

    endless = True
    notes: tuple[str, ...] = ()

    def __init__(self, source: SortingSource, seed: int) -> None:
        self.name = f"sorting of {source.min_items} to {source.max_items} symbols"
        self._source = source
        self._seed = seed

    def __len__(self) -> int:
        return self._source.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < 0:
            raise IndexError(f"row {index}: indices start at 0")
        draws = random.Random(xxhash.xxh3_128_intdigest(f"{self._seed}:{index}".encode()))
        num_items = draws.randint(self._source.min_items, self._source.max_items)
        items = draws.sample(SORTING_SYMBOLS, num_items)
        answer = "".join(sorted(items))
        style = draws.random()
        if style < self._source.astray:
            answer = _astray(answer, draws)
        elif style < self._source.astray + self._source.rambling:
            answer = RAMBLING
        return {"prompt": "".join(items) + "=", "answer": answer, "items": num_items}

    def where(self, index: int) -> str:
        """Return the description of the source and the row number, for error messages."""
        return f"{self.name}, row {index}"


def _astray(answer: str, draws: random.Random) -> str:
    """Return a random prefix of ``answer`` followed by random symbols. The text stops after each random symbol with
    probability END_ASTRAY."""
    answer = answer[: draws.randrange(min(len(answer), LONGEST_ASTRAY))] + draws.choice(SORTING_SYMBOLS)
    while len(answer) < LONGEST_ASTRAY and draws.random() >= END_ASTRAY:
        answer += draws.choice(SORTING_SYMBOLS)
    return answer
