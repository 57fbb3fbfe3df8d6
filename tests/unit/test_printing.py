"""Numbers, ages and sparklines as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from penstock.cli.jobs.audit import equation
from penstock.cli.printing import ago, number, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0, "0"), (1.0, "1"), (1234567, "1,234,567"), (0.123456, "0.1235"), (1e-7, "1e-07"), (True, "True")],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(5, "5s"), (180, "3m"), (7200, "2h"), (200_000, "2d")])
def test_ago(seconds: int, text: str) -> None:
    assert ago(datetime.now(UTC) - timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("values", "width", "text"),
    [
        ([], 5, ""),
        ([None], 5, ""),
        ([1.0, 1.0], 5, "▁▁"),
        ([0.0, None, 1.0], 5, "▁█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([float(i) for i in range(8)], 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values: list[float | None], width: int, text: str) -> None:
    assert sparkline(values, width) == text


def test_equation() -> None:
    counts = {"drawn": 9, "trained": 5, "dropped": {"stale": 1, "failed": 2}, "in_flight": 1}
    assert equation(counts) == "drawn 9 = trained 5 + dropped 3 (failed 2, stale 1) + in flight 1"
    assert equation({}) == "drawn 0 = trained 0 + dropped 0 + in flight 0"
