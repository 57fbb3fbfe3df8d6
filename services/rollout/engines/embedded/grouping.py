"""Groups running rows for attention calls: a call pads its rows to the longest one, so grouped rows should have similar
lengths.

Without reordering, the shorter rows of a group are padded in every step; moving rows costs memory traffic once. Rows
move once the padding that the move would have avoided has cost as much as the move: the total is at most twice the
optimum (ski rental; Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Group", "Grouping", "groups_of", "joined"]

MOVE_COST = 4
"""Cost of moving one position, relative to attention to one position: two reads and two writes, through a buffer."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [start, stop); ``shortest`` and ``longest`` are lengths in tokens."""

    start: int
    stop: int
    shortest: int
    longest: int

    @property
    def positions(self) -> int:
        """Number of positions that attention reads, including padding."""
        return (self.stop - self.start) * self.longest


def groups_of(lengths: Sequence[int], size: int) -> list[Group]:
    """Split rows into consecutive groups of ``size`` rows; the last one may be smaller."""
    starts = range(0, len(lengths), size)
    rows = [(start, lengths[start : start + size]) for start in starts]
    return [Group(start, start + len(some), min(some), max(some)) for start, some in rows]


def joined(groups: Sequence[Group]) -> list[Group]:
    """Merge adjacent groups whose rows all have the same length: fewer attention calls, still without padding."""
    found: list[Group] = []
    for group in groups:
        last = found[-1] if found else None
        if last is not None and last.shortest == last.longest == group.shortest == group.longest:
            found[-1] = Group(last.start, group.stop, group.shortest, group.longest)
        else:
            found.append(group)
    return found


class Grouping:
    """Decides when to reorder the rows.

    Args:
        size: number of rows per group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._wasted = 0

    def order(self, lengths: Sequence[int]) -> list[int] | None:
        """Return, for each position, the row to move there so that groups have descending lengths; None: keep the
        order.

        Call it once per step: it accumulates the padding that sorted rows would have avoided.
        """
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
    """Return an order in which groups have descending lengths; rows that are already in the right group keep their
    position."""
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    order = list(range(len(lengths)))
    for start in range(0, len(lengths), size):
        members = by_length[start : start + size]
        places = range(start, start + len(members))
        incoming = (row for row in members if row not in places)
        for place in set(places).difference(members):
            order[place] = next(incoming)
    return order
