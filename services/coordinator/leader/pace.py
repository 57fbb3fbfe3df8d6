"""Predicts the end of a run from its recent pace."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta

__all__ = ["Pace"]

_NEWEST = 50


class Pace:
    """Average pace of the newest steps whose end this process saw.

    Pauses, and the time before the first step, do not count.
    """

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=_NEWEST)
        self._step: int | None = None

    def end(self, step: int, total: int | None, now: float, *, running: bool) -> datetime | None:
        """Return the predicted end, which changes only with ``step`` and ``total``.

        None while the run is stopped, before two steps have ended, if the total is unknown, or if the end is beyond the
        calendar.

        Args:
            step: steps done.
            total: total number of steps.
            now: Unix seconds.
        """
        went_back = self._step is not None and step < self._step  # rolled back to a checkpoint
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
