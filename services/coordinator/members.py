"""Registry of live worker processes, from their heartbeats. Pure; time is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.shared.protocol.messages import Heartbeat

__all__ = ["Member", "Members"]

LOST_AFTER = 4.0
"""Heartbeat intervals without a sign after which a worker counts as lost."""
FORGET_AFTER_S = 600.0
"""A lost worker stays listed this long."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker and when it was heard last (monotonic seconds)."""

    beat: Heartbeat
    heard: float

    def alive(self, now: float) -> bool:
        """Heard recently enough."""
        return now - self.heard <= max(LOST_AFTER * self.beat.interval_s, 2.0)


class Members:
    """All workers by (service, worker)."""

    def __init__(self) -> None:
        self._members: dict[tuple[str, str], Member] = {}

    def on_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """A worker gave a sign."""
        self._members[beat.service, beat.worker] = Member(beat, now)
        for key in [k for k, m in self._members.items() if now - m.heard > FORGET_AFTER_S]:
            del self._members[key]

    def of(self, service: str, now: float) -> list[Member]:
        """Live workers of a service."""
        return [m for (name, _), m in sorted(self._members.items()) if name == service and m.alive(now)]

    def everybody(self) -> list[Member]:
        """All that are listed, live or lost."""
        return [member for _, member in sorted(self._members.items())]

    def rows(self, job: str, now: float) -> list[dict[str, Any]]:
        """One row per worker, with its entry for ``job``."""
        return [
            {
                "service": m.beat.service,
                "worker": m.beat.worker,
                "host": m.beat.host,
                "pid": m.beat.pid,
                "ready": m.beat.ready,
                "alive": m.alive(now),
                "age_s": round(now - m.heard, 3),
                "clock_skew_s": None if m.beat.clock_skew_s is None else round(m.beat.clock_skew_s, 3),
                **m.beat.jobs.get(job, {}),
            }
            for m in self.everybody()
        ]
