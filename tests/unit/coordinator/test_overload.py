"""Overload: a flood from one key neither displaces another key's items nor fills the memory."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.coordinator.online.matching import max_ready, overload_victims


def test_the_oldest_names_of_the_largest_owner_are_dropped() -> None:
    waiting = [("hostile" if n % 10 else "honest", f"i{n}") for n in range(200)]
    assert overload_victims(waiting, 200) == []
    gone = overload_victims(waiting, 100)
    assert gone == [name for owner, name in waiting if owner == "hostile"][: 200 - 75]
    assert max_ready(10) == 256
    assert max_ready(1000) == 4000


@given(st.lists(st.sampled_from("aaaabbc"), max_size=80), st.integers(1, 40))
def test_relief_ends_below_the_limit_and_spares_small_owners(owners: list[str], most: int) -> None:
    waiting = [(owner, f"{owner}{n}") for n, owner in enumerate(owners)]
    before = Counter(owners)
    for _ in range(80):
        gone = set(overload_victims(waiting, most))
        if not gone:
            break
        counts = Counter(owner for owner, _ in waiting)
        assert {name[0] for name in gone} <= {owner for owner in counts if counts[owner] == max(counts.values())}
        waiting = [pair for pair in waiting if pair[1] not in gone]
    assert len(waiting) <= most
    after = Counter(owner for owner, _ in waiting)
    fair = most // (2 * max(1, len(before)))
    assert all(after[owner] == count for owner, count in before.items() if count <= fair)
