"""When a run is expected to be over."""

from __future__ import annotations

from penstock.services.coordinator.pace import Pace


def test_the_newest_steps_say_how_long_the_others_take() -> None:
    pace = Pace()
    assert pace.end(0, 100, 1000.0) is None
    ends = [pace.end(step, 100, 1000.0 + 2 * step) for step in range(1, 60)]
    assert {end.timestamp() for end in ends if end is not None} == {1200.0}
    faster = [pace.end(59 + step, 1000, 1118.0 + 0.5 * step) for step in range(1, 61)][-1]
    assert faster is not None
    assert faster.timestamp() == 1148.0 + (1000 - 119) * 0.5, "steps long ago do not count"


def test_it_stays_while_no_step_is_done_and_begins_anew_after_a_rollback() -> None:
    pace = Pace()
    pace.end(10, 20, 0.0)
    end = pace.end(12, 20, 4.0)
    assert end is not None
    assert end.timestamp() == 20.0
    assert pace.end(12, 20, 500.0) == end
    assert pace.end(5, 20, 600.0) is None
    again = pace.end(6, 20, 601.0)
    assert again is not None
    assert again.timestamp() == 615.0


def test_a_run_without_an_end_has_none() -> None:
    pace = Pace()
    pace.end(1, None, 0.0)
    assert pace.end(2, None, 1.0) is None
