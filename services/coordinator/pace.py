"""When a run will be over, should it go on as it did lately."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta

__all__ = ["Pace"]

_NEWEST = 50


class Pace:
    """Measured between the ends of the newest steps that this process saw; what lies before the first one, or a pause,
    says nothing about the others."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=_NEWEST)
        self._step: int | None = None

    def end(self, step: int, total: int | None, now: float, *, running: bool) -> datetime | None:
        """Changes with ``step`` and ``total`` only. None while the run does not go on, until two steps ended, where
        nothing says how many there will be, and where the calendar ends first.

        Args:
            step: how many are done.
            total: how many there will be.
            now: Unix seconds.
        """
        went_back = self._step is not None and step < self._step  # to a checkpoint
        if not running or went_back:
            self._ends.clear()
        elif self._step is not None and step > self._step:
            self._ends.append((now, step))
        self._step = step if running else None
        if total is None or len(self._ends) < 2:
            return None
        (began, first), (ended, last) = self._ends[0], self._ends[-1]
        try:
            left = timedelta(seconds=(ended - began) / (last - first) * max(0, total - last))
            return datetime.fromtimestamp(ended, UTC) + left
        except OverflowError:
            return None
