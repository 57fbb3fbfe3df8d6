"""One clock for all processes: that of the message bus, which stamps every message that it stores.

What two processes compare is in bus time: deadlines in the ledger, when feedback was received, until when a key is
valid. The process measures the bus (``Bus.measure_clock``) and goes on with its own monotonic clock, so that neither a
wrong wall clock of its host nor a step of it decides anything. Before the first measurement bus time is the wall clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["MAX_SKEW_S", "ClockSample", "bus_datetime", "bus_time", "clock_skew_s", "forget_bus_clock", "set_bus_clock"]

MAX_SKEW_S = 1.0
"""A wall clock that differs by more from bus time is reported."""


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One question to the server: ``wall`` and ``asked`` are this host's wall and monotonic clock when it was sent,
    ``answered`` the monotonic clock at the answer, ``server`` what the server's clock said in between (Unix seconds).
    """

    wall: float
    asked: float
    answered: float
    server: float

    @property
    def round_trip_s(self) -> float:
        """Within which the server read its clock."""
        return self.answered - self.asked

    @property
    def skew_s(self) -> float:
        """Seconds that this host's wall clock is ahead of the server's; 0.0 where the round trip explains it."""
        least, most = self.wall - self.server, self.wall + self.round_trip_s - self.server
        return 0.0 if least <= 0.0 <= most else (least + most) / 2


class _BusClock:
    """The bus's clock as this process knows it. One for the process, as the clocks of its host are."""

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
    """Bus time goes on from this sample."""
    _clock.set(sample)


def forget_bus_clock() -> None:
    """Bus time is the wall clock again, as before the first measurement."""
    _clock.skew_s = None


def bus_time() -> float:
    """Now in bus time (Unix seconds)."""
    return _clock.now()


def bus_datetime() -> datetime:
    """Now in bus time, in UTC."""
    return datetime.fromtimestamp(_clock.now(), UTC)


def clock_skew_s() -> float | None:
    """Seconds that this host's wall clock is ahead of bus time, as last measured; None: not measured."""
    return _clock.skew_s
