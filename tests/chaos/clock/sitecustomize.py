"""A wall clock that a file controls; Python imports this module by itself if PYTHONPATH names the folder.

``CHAOS_CLOCK`` names a file with seconds to add to ``time.time`` and ``time.time_ns``; the process reads it again every
half second. Monotonic clocks and sleeps stay right, as on a host whose clock is set. libfaketime cannot do that: with a
true monotonic clock it makes ``time.sleep`` fail (its ``clock_nanosleep`` takes a monotonic deadline for a wall-clock
one).
"""

import os
import time

_LOOK_S = 0.5
_file = os.environ.get("CHAOS_CLOCK", "")
_time, _time_ns, _monotonic = time.time, time.time_ns, time.monotonic
_looked, _skew_s = -_LOOK_S, 0


def _skew() -> int:
    global _looked, _skew_s  # noqa: PLW0603
    now = _monotonic()
    if now - _looked >= _LOOK_S:
        _looked = now
        try:
            with open(_file, encoding="ascii") as file:  # noqa: PTH123
                _skew_s = int(file.read())
        except (OSError, ValueError):
            pass
    return _skew_s


if _file:
    time.time = lambda: _time() + _skew()
    time.time_ns = lambda: _time_ns() + _skew() * 1_000_000_000
