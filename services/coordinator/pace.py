"""When a run will be over, should it go on as it did lately."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime

__all__ = ["Pace"]

_NEWEST = 50


class Pace:
    """Measured over the newest steps that this process saw; a pause among them counts as time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_NEWEST)
        self._end: datetime | None = None

    def end(self, step: int, total: int | None, now: float) -> datetime | None:
        """Changes with the step only. None until two steps were seen, and where nothing says how many there will be.

        Args:
            step: how many are done.
            total: how many there will be.
            now: Unix seconds.
        """
        if self._seen and self._seen[-1][1] == step:
            return self._end
        if self._seen and self._seen[-1][1] > step:  # the run went back to a checkpoint
            self._seen.clear()
        self._seen.append((now, step))
        began, first = self._seen[0]
        if total is None or step == first:
            self._end = None
        else:
            self._end = datetime.fromtimestamp(now + (now - began) * max(0, total - step) / (step - first), UTC)
        return self._end
