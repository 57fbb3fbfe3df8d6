"""The heap of values that change often: the answers of a search, bounded memory, and little work at each call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.coordinator.online import undecided
from penstock.services.coordinator.online.undecided import CLEANED, LazyHeap

NAMES = st.sampled_from("abcdef")
VALUES = st.integers(0, 9).map(float)
STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, VALUES), st.tuples(st.just("drop"), NAMES, VALUES),
    st.tuples(st.just("lowest"), NAMES, VALUES), st.tuples(st.just("pop"), NAMES, VALUES),
)  # fmt: skip


class Values:
    """Current values with a heap over them; ``asked`` counts how often the heap checks whether a value still holds."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.asked = 0
        self.heap = LazyHeap(self.holds, lambda: len(self.now))

    def holds(self, value: float, name: str) -> bool:
        self.asked += 1
        return self.now.get(name) == value

    def put(self, name: str, value: float) -> None:
        self.now[name] = value
        self.heap.put(value, name)


@pytest.fixture(autouse=True)
def _clean_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undecided, "SLACK", 2)


@given(st.lists(STEPS, max_size=120))
def test_a_heap_in_cleaning_gives_the_same_answers_as_a_search(steps: list[tuple[str, str, float]]) -> None:
    values = Values()
    for step, name, value in steps:
        if step == "put":
            values.put(name, value)
        elif step == "drop":
            values.now.pop(name, None)
        elif step == "lowest":
            others = [found for other, found in values.now.items() if other != name]
            assert values.heap.lowest({name}) == min(others, default=None)
        else:
            due = sorted((found, other) for other, found in values.now.items() if found <= value)
            popped = list(values.heap.pop_until(value))
            assert sorted((values.now[other], other) for other in popped) == due
            assert [values.now[other] for other in popped] == [found for found, _ in due]
            for other in popped:
                del values.now[other]


def test_a_put_checks_few_values_however_many_wait() -> None:
    """While no value is outdated, as for a new leader that reads a million, the heap checks none."""
    values = Values()
    for number in range(5_000):
        values.put(str(number), float(number))
    assert values.asked == 0
    for number in range(1_000, 5_000):  # nearly all become outdated at once
        del values.now[str(number)]
    busiest = 0
    for number in range(2_000):
        before = values.asked
        values.put(str(number % 1_000), float(number))
        busiest = max(busiest, values.asked - before)
    assert 0 < busiest <= CLEANED
    assert len(values.heap) <= 3 * len(values.now) + undecided.SLACK
    assert values.heap.lowest() == min(values.now.values())


def test_the_same_value_put_again_and_again_takes_no_room() -> None:
    values = Values()
    for _ in range(10_000):
        values.put("a", 1.0)
    assert len(values.heap) <= 10
    assert list(values.heap.pop_until(1.0)) == ["a"]
