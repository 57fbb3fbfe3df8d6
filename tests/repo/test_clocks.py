"""Two processes never compare the clocks of their hosts: services read bus time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SERVICES = Path(__file__).resolve().parents[2] / "services"
WALL_CLOCK = re.compile(r"\btime\.time\(|\btime\.time_ns\(|\bdatetime\.(?:now|utcnow)\(|=time\.time\b")
ALLOWED = {
    "coordinator/api/http/ratelimit.py",  # the limits of this process count by it
    "env/verifiers/child.py",  # shown, compared with nothing
    "reward/scorers/http.py",  # of a signature that the other side checks by its own clock; a child has no bus
}


@pytest.mark.parametrize("path", sorted(SERVICES.glob("**/*.py")), ids=lambda path: str(path.relative_to(SERVICES)))
def test_services_read_bus_time(path: Path) -> None:
    found = WALL_CLOCK.findall(path.read_text(encoding="utf-8"))
    assert not found or str(path.relative_to(SERVICES)) in ALLOWED, (
        "the clock of a host may be wrong: use bus_time() or bus_datetime(), or time.monotonic() for durations"
    )
