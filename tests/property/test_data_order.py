"""The data order: every row once per epoch, exact shares, and the same order in every process."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.config.data import DataConfig
from penstock.shared.data.files import JsonLinesRows
from penstock.shared.data.order import DataOrder, apportion, permutation
from penstock.shared.data.rows import open_rows
from penstock.shared.errors import DataError

SIZES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 8.0)), min_size=1, max_size=4)


def make_rows(size: int) -> JsonLinesRows:
    """Return ``size`` rows ``{"i": i}``."""
    return JsonLinesRows(f"{size}.jsonl", [(i + 1, b'{"i": %d}' % i) for i in range(size)])


def make_order(sizes: list[tuple[int, float]], seed: int, **config: Any) -> DataOrder:
    sources = [{"type": "file", "path": f"{n}.jsonl", "weight": weight} for n, weight in sizes]
    return DataOrder(DataConfig.parse({"train": sources, **config}), [make_rows(n) for n, _ in sizes], seed)


@given(st.integers(1, 300), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_one_source_gives_every_row_once_per_epoch(size: int, seed: int, epoch: int) -> None:
    order = make_order([(size, 1.0)], seed)
    places = [order(epoch * size + i) for i in range(size)]
    assert order.rows_per_epoch == size
    assert sorted(place.row for place in places) == list(range(size))
    assert {place.epoch for place in places} == {epoch}


@given(SIZES, st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_mixture_keeps_shares_and_walks_each_source_fairly(
    sizes: list[tuple[int, float]], seed: int, shuffle: bool
) -> None:
    order = make_order(sizes, seed, shuffle=shuffle)
    total = sum(n for n, _ in sizes)
    assert order.rows_per_epoch == total
    counts = apportion([w for _, w in sizes], total)
    walks: dict[int, list[int]] = {s: [] for s in range(len(sizes))}
    for epoch in range(4):
        places = [order(epoch * total + i) for i in range(total)]
        assert Counter(p.source for p in places) == Counter({s: n for s, n in enumerate(counts) if n})
        for place in places:
            walks[place.source].append(place.row)
    for source, (size, _) in enumerate(sizes):
        whole = len(walks[source]) // size
        for number in range(whole):  # each pass of a source is a permutation of its rows
            assert sorted(walks[source][number * size : (number + 1) * size]) == list(range(size))


@given(SIZES, st.integers(0, 2**32), st.lists(st.integers(0, 5000), min_size=1, max_size=30))
@settings(max_examples=60)
def test_places_do_not_depend_on_earlier_calls(sizes: list[tuple[int, float]], seed: int, ordinals: list[int]) -> None:
    order = make_order(sizes, seed)
    in_turn = {ordinal: order(ordinal) for ordinal in sorted(ordinals)}
    for ordinal in ordinals:
        assert make_order(sizes, seed)(ordinal) == in_turn[ordinal] == order(ordinal)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8), st.integers(0, 10_000))
def test_apportion_adds_up_and_is_off_by_less_than_one(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert sum(counts) == total
    assert all(abs(n - total * w / sum(weights)) < 1 + 1e-6 for n, w in zip(counts, weights, strict=True))


def test_sources_are_spread_evenly() -> None:
    order = make_order([(300, 3.0), (100, 1.0)], seed=0)
    for start in range(0, 400, 20):
        assert Counter(order(i).source for i in range(start, start + 20)) == {0: 15, 1: 5}


def test_epochs_and_seeds_differ() -> None:
    order, other = make_order([(64, 1.0)], seed=1), make_order([(64, 1.0)], seed=2)
    epochs = [tuple(order(e * 64 + i).row for i in range(64)) for e in range(3)]
    assert len(set(epochs)) == 3
    assert tuple(other(i).row for i in range(64)) not in epochs
    assert [make_order([(64, 1.0)], 1, shuffle=False)(i).row for i in range(64)] == list(range(64))


def test_permutation_is_uniform_enough() -> None:
    first = Counter(int(permutation(6, f"k{n}")[0]) for n in range(3000))
    assert set(first) == set(range(6))
    assert max(abs(count - 500) for count in first.values()) < 120  # 500 ± 20.4, six sigma


def test_another_process_gives_the_same_order() -> None:
    """The test also pins the order: a change would break resuming and replaying of existing jobs."""
    here = permutation(1000, "7:0:3")
    script = "from penstock.shared.data.order import permutation as p; print(p(1000, '7:0:3').tolist())"
    there = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert there.strip() == str(here.tolist())
    assert permutation(10, "7:0:3").tolist() == PINNED


PINNED = [9, 6, 0, 5, 7, 8, 4, 2, 3, 1]


def test_endless_source_gives_new_rows_each_epoch() -> None:
    config = DataConfig.parse({"train": {"type": "addition", "digits": 9, "num_rows": 20}})
    rows = open_rows(config.train[0], seed=5)
    order = DataOrder(config, [rows], seed=5)
    seen = [order(i).row for i in range(60)]
    assert [sorted(seen[e : e + 20]) for e in (0, 20, 40)] == [list(range(e, e + 20)) for e in (0, 20, 40)]
    assert len({rows[i]["prompt"] for i in seen}) == 60


def descending(row: dict[str, Any]) -> float:
    """Return the rank of a row in a curriculum that begins with the last row."""
    return -float(row["i"])


def not_a_number(row: dict[str, Any]) -> float:
    """Return a rank that is NaN for one row."""
    return float("nan") if row["i"] == 3 else 0.0


def test_curriculum_sorts_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "curriculum_under_test", sys.modules[__name__])
    order = make_order([(10, 1.0), (5, 1.0)], seed=3, curriculum="curriculum_under_test:descending")
    for epoch in range(3):
        rows = np.array([order(epoch * 15 + i).row for i in range(15)])
        assert (np.diff(rows) <= 0).all()
    with pytest.raises(DataError, match=r"line 4: data\.curriculum returned nan"):
        make_order([(10, 1.0)], seed=3, curriculum="curriculum_under_test.not_a_number")(0)
    with pytest.raises(DataError, match=r"data\.curriculum: 'no\.such:rank' cannot be imported"):
        make_order([(10, 1.0)], seed=3, curriculum="no.such:rank")
