"""Bus time: all processes use the clock of the message bus, which stamps every stored message.

All times that two processes compare are in bus time: deadlines in the ledger, times at which feedback was received,
expiry of keys. A process measures the bus clock (``Bus.measure_clock``) and extrapolates with its own monotonic clock,
so that neither a wrong wall clock of its host nor a jump of it affects a decision. Before the first measurement, bus
time is the wall clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["MAX_SKEW_S", "ClockSample", "bus_datetime", "bus_time", "clock_skew_s", "forget_bus_clock", "set_bus_clock"]

MAX_SKEW_S = 1.0
"""Difference of wall clock and bus time (seconds) above which a warning is reported."""


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One measurement of the server's clock. At the request, this host's clocks were ``wall`` (wall clock) and
    ``asked`` (monotonic); at the response, ``answered`` (monotonic). In between, the server's clock was ``server``
    (Unix seconds)."""

    wall: float
    asked: float
    answered: float
    server: float

    @property
    def round_trip_s(self) -> float:
        """Duration of the request, which bounds the error of the offset (seconds)."""
        return self.answered - self.asked

    @property
    def skew_s(self) -> float:
        """Seconds that this host's wall clock is ahead of the server's; 0.0 if the delay of the request can explain the
        difference."""
        least, most = self.wall - self.server, self.wall + self.round_trip_s - self.server
        return 0.0 if least <= 0.0 <= most else (least + most) / 2


class _BusClock:
    """Bus clock of this process: one object, because the whole process has the same wall and monotonic clocks."""

    def __init__(self) -> None:
        self.skew_s: float | None = None
        self._at = self._time = 0.0

    def set(self, sample: ClockSample) -> None:
        self._at, self._time = sample.answered, sample.wall + sample.round_trip_s - sample.skew_s
        self.skew_s = sample.skew_s

    def now(self) -> float:
        return time.time() if self.skew_s is None else self._time + time.monotonic() - self._at


_clock = _BusClock()


def set_bus_clock(sample: ClockSample) -> None:
    """Compute bus time from ``sample`` from now on."""
    _clock.set(sample)


def forget_bus_clock() -> None:
    """Use the wall clock as bus time again, as before the first measurement."""
    _clock.skew_s = None


def bus_time() -> float:
    """Return the current bus time (Unix seconds)."""
    return _clock.now()


def bus_datetime() -> datetime:
    """Return the current bus time, in UTC."""
    return datetime.fromtimestamp(_clock.now(), UTC)


def clock_skew_s() -> float | None:
    """Return the seconds that this host's wall clock was ahead of bus time at the last measurement; None: not
    measured."""
    return _clock.skew_s
