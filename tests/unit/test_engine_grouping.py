"""Rows of similar length attend together, and moving them never costs much more than leaving them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.rollout.engines.embedded.grouping import MOVE_COST, Group, Grouping, groups_of, joined

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)
SIZES = st.integers(1, 9)


def positions(lengths: list[int], size: int) -> int:
    return sum(group.positions for group in groups_of(lengths, size))


def test_groups_are_neighbours_and_know_their_lengths() -> None:
    assert groups_of([5, 7, 7, 7, 2], 2) == [Group(0, 2, 5, 7), Group(2, 4, 7, 7), Group(4, 5, 2, 2)]
    assert groups_of([], 8) == []


def test_equally_long_neighbours_attend_in_one_call() -> None:
    found = joined(groups_of([7, 7, 7, 7, 7, 6, 5, 5, 5, 5, 4, 4], 2))
    assert found == [Group(0, 4, 7, 7), Group(4, 6, 6, 7), Group(6, 10, 5, 5), Group(10, 12, 4, 4)]
    assert joined([]) == []


@given(LENGTHS, SIZES)
def test_an_order_is_a_permutation_without_avoidable_padding(lengths: list[int], size: int) -> None:
    grouping, order = Grouping(size), None
    excess = positions(lengths, size) - positions(sorted(lengths, reverse=True), size)
    steps = 0
    while excess > 0 and order is None:
        order, steps = grouping.order(lengths), steps + 1
    if order is None:
        assert grouping.order(lengths) is None
        return
    assert sorted(order) == list(range(len(lengths)))
    arranged = [lengths[row] for row in order]
    assert positions(arranged, size) == positions(sorted(lengths, reverse=True), size)
    moved = sum(lengths[row] for place, row in enumerate(order) if row != place)
    assert (steps - 1) * excess < MOVE_COST * moved <= steps * excess  # padding has cost as much as the move now costs
    assert Grouping(size).order(arranged) is None


def test_rows_that_are_in_the_right_group_stay() -> None:
    lengths = [90, 80, 10, 70, 100, 20]  # groups of three: 100, 90, 80 and 70, 20, 10
    grouping = Grouping(3)
    order = None
    while order is None:
        order = grouping.order(lengths)
    assert order == [0, 1, 4, 3, 2, 5]


def test_in_a_steady_state_little_is_padded_and_little_is_moved() -> None:
    """Sixty-four rows, one of which ends and is replaced every other step, as under constant load."""
    chance, size, grouping = random.Random(0), 8, Grouping(8)
    lengths = [chance.randrange(4, 132) for _ in range(64)]
    attended = moved = needed = 0
    for _ in range(2_000):
        lengths = [length + 1 for length in lengths]
        for row in [row for row, length in enumerate(lengths) if length >= 132]:
            lengths[row] = lengths[-1]  # the last row moves into the hole, and a new one comes to the end
            lengths[-1] = 4
        order = grouping.order(lengths)
        if order is not None:
            moved += sum(lengths[row] for place, row in enumerate(order) if row != place)
            lengths = [lengths[row] for row in order]
        attended += positions(lengths, size)
        needed += sum(lengths)
    assert attended < 1.35 * needed
    assert MOVE_COST * moved < 0.3 * needed
    assert 1.9 * needed < 64 * 132 * 2_000, "one group would read nearly twice as much"
