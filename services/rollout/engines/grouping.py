"""Which running rows attend together: an attention call is as long as its longest row, so neighbours should be alike.

Rows come and go. Where they stand, the shorter ones of a group are padded in every step; moving them costs memory
traffic once. They move when the padding that moving would have saved has cost as much: never more than twice what the
best plan costs (ski rental; Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Group", "Grouping", "groups_of", "joined"]

MOVE_COST = 4
"""Attended positions that cost as much as moving one: it is read and written twice, and attention reads it once."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [start, stop); ``shortest`` and ``longest`` are lengths in tokens."""

    start: int
    stop: int
    shortest: int
    longest: int

    @property
    def positions(self) -> int:
        """Tokens that attention reads, padding included."""
        return (self.stop - self.start) * self.longest


def groups_of(lengths: Sequence[int], size: int) -> list[Group]:
    """Neighbours in groups of ``size`` rows; the last one may be smaller."""
    starts = range(0, len(lengths), size)
    rows = [(start, lengths[start : start + size]) for start in starts]
    return [Group(start, start + len(some), min(some), max(some)) for start, some in rows]


def joined(groups: Sequence[Group]) -> list[Group]:
    """The same rows with equally long neighbours in one group: nothing is padded, and there are fewer calls."""
    found: list[Group] = []
    for group in groups:
        last = found[-1] if found else None
        if last is not None and last.shortest == last.longest == group.shortest == group.longest:
            found[-1] = Group(last.start, group.stop, group.shortest, group.longest)
        else:
            found.append(group)
    return found


class Grouping:
    """Decides when rows change places.

    Args:
        size: rows of a group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._wasted = 0

    def order(self, lengths: Sequence[int]) -> list[int] | None:
        """Which row should stand at each place from now on, the longest first; None: all stay where they are."""
        excess = _positions(lengths, self.size) - _positions(sorted(lengths, reverse=True), self.size)
        self._wasted = self._wasted + excess if excess > 0 else 0
        if not self._wasted:
            return None
        order = _arranged(lengths, self.size)
        moved = sum(lengths[row] for place, row in enumerate(order) if row != place)
        if self._wasted < MOVE_COST * moved:
            return None
        self._wasted = 0
        return order


def _positions(lengths: Sequence[int], size: int) -> int:
    return sum(group.positions for group in groups_of(lengths, size))


def _arranged(lengths: Sequence[int], size: int) -> list[int]:
    """Rows by length in groups; who is in the right group already stays at its place."""
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    order = list(range(len(lengths)))
    for start in range(0, len(lengths), size):
        members = by_length[start : start + size]
        places = range(start, start + len(members))
        incoming = (row for row in members if row not in places)
        for place in set(places).difference(members):
            order[place] = next(incoming)
    return order
