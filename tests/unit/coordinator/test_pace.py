"""The expected end of a run."""

from __future__ import annotations

import pytest

from penstock.services.coordinator.leader.pace import Pace


def seconds(pace: Pace, step: int, total: int | None, now: float, *, running: bool = True) -> float | None:
    end = pace.end(step, total, now, running=running)
    return None if end is None else end.timestamp()


def test_the_newest_steps_predict_the_time_of_the_others() -> None:
    pace = Pace()
    assert [seconds(pace, 0, 100, 0.0), seconds(pace, 1, 100, 1802.0)] == [None, None], "a warm start is no step"
    assert {seconds(pace, step, 100, 1800.0 + 2 * step) for step in range(2, 60)} == {2000.0}
    faster = [seconds(pace, 59 + step, 1000, 1918.0 + 0.5 * step) for step in range(1, 61)][-1]
    assert faster == 1948.0 + (1000 - 119) * 0.5, "steps long ago do not count"


def test_the_expected_end_stays_without_steps_and_follows_an_amended_total() -> None:
    pace = Pace()
    for step in (10, 11, 12):
        seconds(pace, step, 20, 2.0 * step)
    assert seconds(pace, 12, 20, 25.0) == seconds(pace, 12, 20, 500.0) == 40.0
    assert seconds(pace, 12, 120, 501.0) == 240.0
    assert seconds(pace, 12, 12, 501.0) == 24.0


@pytest.mark.parametrize("break_", [(13, False), (5, True)], ids=["a pause", "a rollback"])
def test_the_estimate_starts_again_after_a_pause_or_a_rollback(break_: tuple[int, bool]) -> None:
    pace = Pace()
    for step in (10, 11, 12, 13):
        seconds(pace, step, 20, 2.0 * step)
    step, running = break_
    assert seconds(pace, step, 20, 100.0, running=running) is None
    found = [seconds(pace, step + more, 20, 50_000.0 + more) for more in range(4)]
    assert found == [None, None, 50_000.0 + 20 - step, 50_000.0 + 20 - step]


def test_a_run_without_an_end_has_no_expected_end() -> None:
    pace = Pace()
    for step in range(4):
        assert seconds(pace, step, None, float(step)) is None
    assert seconds(pace, 4, 10**15, 4.0) is None, "no calendar goes so far"
