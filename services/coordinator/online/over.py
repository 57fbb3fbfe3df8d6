"""Posted episodes that are decided, so that a turn that comes late is told from a new episode. Pure.

The ledger forgets those that were admitted, and never knew those that were refused: DECISIONS tells a new leader.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import xxhash

__all__ = ["Over", "mark_of"]

MAX_OVER = 100_000
"""Episodes that are remembered."""


def mark_of(episode: str) -> str:
    """What stands for an episode where names that people made up must not stand."""
    return xxhash.xxh3_128_hexdigest(episode.encode())


class Over:
    """The newest ones."""

    def __init__(self) -> None:
        self._marks: OrderedDict[str, None] = OrderedDict()
        self._untold: list[tuple[str, str]] = []

    def __contains__(self, episode: str) -> bool:
        return mark_of(episode) in self._marks

    def add(self, episode: str, refused: Iterable[str] = ()) -> None:
        """An episode is decided; ``refused``: its items, where none of it is trained."""
        mark = mark_of(episode)
        self._untold += [(mark, item) for item in refused] or [(mark, "")]
        self._remember(mark)

    def recall(self, told: Iterable[tuple[str, str]]) -> None:
        """What an earlier leader told."""
        for mark, _ in told:
            self._remember(mark)

    def drain(self) -> list[tuple[str, str]]:
        """Marks of what was decided since somebody asked, each with an item refused with it or ''."""
        found, self._untold = self._untold, []
        return found

    def _remember(self, mark: str) -> None:
        self._marks[mark] = None
        if len(self._marks) > MAX_OVER:
            self._marks.popitem(last=False)
