"""Bus time: one clock for all processes, whatever the clocks of their hosts show."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from penstock.shared.protocol.bus_clock import (
    ClockSample,
    bus_datetime,
    bus_time,
    clock_skew_s,
    forget_bus_clock,
    set_bus_clock,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Heartbeat, Ticket


def sample(ahead_s: float, *, round_trip_s: float = 0.01) -> ClockSample:
    """Return a measurement of a host clock that is ``ahead_s`` ahead of the server's.

    The server reads its clock in the middle of the round trip.
    """
    at = time.monotonic()
    now = time.time()
    return ClockSample(now, at, at + round_trip_s, now + round_trip_s / 2 - ahead_s)


def test_bus_time_is_the_wall_clock_until_the_bus_clock_is_measured() -> None:
    assert clock_skew_s() is None
    assert abs(bus_time() - time.time()) < 1.0


@pytest.mark.parametrize("ahead_s", [3600.0, 130.0, -3600.0])
def test_bus_time_corrects_a_wrong_wall_clock(ahead_s: float) -> None:
    set_bus_clock(sample(ahead_s))
    assert clock_skew_s() == pytest.approx(ahead_s, abs=0.01)
    assert bus_time() == pytest.approx(time.time() - ahead_s, abs=1.0)
    assert bus_datetime().timestamp() == pytest.approx(bus_time(), abs=1.0)
    forget_bus_clock()
    assert bus_time() == pytest.approx(time.time(), abs=1.0)


def test_a_jump_of_the_wall_clock_does_not_change_bus_time(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bus_clock(sample(0.0))
    before, real = bus_time(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    assert bus_time() - before < 60


def test_a_difference_within_the_round_trip_is_no_skew() -> None:
    assert sample(0.0, round_trip_s=2.0).skew_s == 0.0
    assert sample(0.9, round_trip_s=2.0).skew_s == 0.0
    assert sample(1.1, round_trip_s=2.0).skew_s == pytest.approx(1.1)


def ticket(**fields: Any) -> Ticket:
    return Ticket(draw=Draw(0), min_version=0, deadline=bus_time() + 60, epoch=1, **fields)


def test_a_ticket_ages_by_the_time_of_its_message() -> None:
    """The age of a ticket is the bus time since the server stored its message, also after a redelivery."""
    set_bus_clock(sample(130.0))
    assert ticket(deadline_s=60.0).left_s(bus_time()) == pytest.approx(60, abs=1)
    assert ticket(deadline_s=60.0).left_s(bus_time() - 50) == pytest.approx(10, abs=1)
    assert ticket(deadline_s=60.0).left_s(bus_time() - 70) == 0.0
    assert ticket(deadline_s=60.0).left_s(bus_time() + 5) == 60.0, "never more than its deadline"


def test_a_ticket_of_the_first_version_is_read_by_bus_time() -> None:
    set_bus_clock(sample(130.0))
    assert ticket().left_s(bus_time()) == pytest.approx(60, abs=1)


def test_without_a_bus_clock_no_ticket_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, real = time.time(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 130)
    assert ticket(deadline_s=60.0).left_s(stored) == 60.0


def test_messages_of_the_first_version_have_no_clock_fields() -> None:
    old = {"draw": [3, 1], "min_version": 2, "deadline": 1e9, "epoch": 4}
    assert msgspec.convert(old, Ticket).deadline_s is None
    beat = {
        "service": "rollout", "worker": "w", "host": "h", "pid": 1, "started": 0.0, "interval_s": 1.0,
        "health_port": 0, "ready": True, "jobs": {},
    }  # fmt: skip
    assert msgspec.convert(beat, Heartbeat).clock_skew_s is None
