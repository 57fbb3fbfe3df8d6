"""Services read bus time, so that no two processes compare the clocks of their hosts."""

from __future__ import annotations

import re
from pathlib import Path

SERVICES = Path(__file__).resolve().parents[2] / "services"
WALL_CLOCK = re.compile(r"\btime\.time\(|\btime\.time_ns\(|\bdatetime\.(?:now|utcnow)\(|=time\.time\b")
ALLOWED = {
    "coordinator/api/http/ratelimit.py",  # the limits of this process count by it
    "env/verifiers/child.py",  # shown, compared with nothing
    "reward/scorers/http.py",  # of a signature that the other side checks by its own clock; a child has no bus
}


def test_services_read_bus_time() -> None:
    texts = {str(path.relative_to(SERVICES)): path.read_text(encoding="utf-8") for path in SERVICES.glob("**/*.py")}
    assert texts.keys() >= ALLOWED
    found = {name for name, text in texts.items() if WALL_CLOCK.search(text)}
    assert found == ALLOWED, (
        "the clock of a host may be wrong: use bus_time() or bus_datetime(), or time.monotonic() for durations"
    )
