"""Registry of worker processes, built from their heartbeats, with reports of lost and returned workers. Does no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from penstock.shared.protocol.messages import Heartbeat

__all__ = ["Member", "Members", "PresenceChange", "PresenceWatch", "ProblemWatch"]

LOST_AFTER = 4.0
"""Number of intervals without a heartbeat after which a worker counts as lost."""
FORGET_AFTER_S = 600.0
"""Time for which a lost worker stays listed (seconds)."""
HISTORY_S = 300.0
"""Time for which states of a worker are kept (seconds)."""
PROBLEM_S = 300.0
"""Minimum time between two reports of problems of one worker with one job (seconds)."""
MOST_SPANS = 200
"""Maximum number of state intervals that are kept for one worker and one job; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker and the time of its newest heartbeat (monotonic seconds)."""

    beat: Heartbeat
    heard: float

    def alive(self, now: float) -> bool:
        """Return True if the newest heartbeat is recent enough."""
        return now - self.heard <= _silence(self.beat)


@dataclass(slots=True)
class Span:
    """Interval in which the heartbeats of a worker report one state for a job. ``start``, ``end``: monotonic
    seconds."""

    kind: Literal["busy", "waiting", "lost"]
    wait: str
    start: float
    end: float

    def row(self, now: float) -> dict[str, Any]:
        """Return the span as JSON, in seconds before ``now``, so that it does not depend on the reader's clock."""
        ages = {"start_age_s": round(now - self.start, 3), "end_age_s": round(now - self.end, 3)}
        return {"kind": self.kind, "wait": self.wait, **ages}


class History:
    """Records the state intervals (``Span``) of one worker, by job."""

    def __init__(self) -> None:
        self._spans: dict[str, deque[Span]] = {}

    def note(self, beat: Heartbeat, now: float) -> None:
        """For each job in a heartbeat, extend the newest span or begin a new one; drop jobs without recent spans."""
        for job, row in beat.jobs.items():
            spans = self._spans.setdefault(job, deque(maxlen=MOST_SPANS))
            if spans and now - spans[-1].end > _silence(beat):
                spans.append(Span("lost", "", spans[-1].end, now))
            kind: Literal["busy", "waiting"] = "busy" if row.get("running") else "waiting"
            wait = str(row.get("waiting_for") or "")
            if spans and (spans[-1].kind, spans[-1].wait) == (kind, wait):
                spans[-1].end = now
            else:
                spans.append(Span(kind, wait, spans[-1].end if spans else now, now))
        self._spans = {job: spans for job, spans in self._spans.items() if now - spans[-1].end < HISTORY_S}

    def rows(self, job: str, now: float) -> list[dict[str, Any]]:
        """Return the spans of the last HISTORY_S, oldest first."""
        return [span.row(now) for span in self._spans.get(job, ()) if now - span.end < HISTORY_S]


def _silence(beat: Heartbeat) -> float:
    """Return the seconds without a heartbeat after which the worker of ``beat`` counts as lost, at least 2."""
    return max(LOST_AFTER * beat.interval_s, 2.0)


class Members:
    """All known workers by (service, worker). Times are monotonic seconds, passed by the caller.

    Attributes:
        complete_at: time from which every living worker is known: before, one that was already running may not have
            sent a heartbeat since this process began to listen.
    """

    def __init__(self) -> None:
        self.complete_at = 0.0
        self._members: dict[tuple[str, str], Member] = {}
        self._histories: dict[tuple[str, str], History] = {}

    def on_heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """Record a heartbeat; return True if its worker was not alive before, or if its readiness changed."""
        before = self._members.get((beat.service, beat.worker))
        self._members[beat.service, beat.worker] = Member(beat, now)
        for key in [k for k, m in self._members.items() if now - m.heard > FORGET_AFTER_S]:
            del self._members[key]
            self._histories.pop(key, None)
        self._histories.setdefault((beat.service, beat.worker), History()).note(beat, now)
        return before is None or not before.alive(now) or before.beat.ready != beat.ready

    def of(self, service: str, now: float) -> list[Member]:
        """Return the live workers of a service."""
        return [m for (name, _), m in sorted(self._members.items()) if name == service and m.alive(now)]

    def everybody(self) -> list[Member]:
        """Return all listed workers, live or lost."""
        return [member for _, member in sorted(self._members.items())]

    def rows(self, job: str, now: float, *, history: bool = False) -> list[dict[str, Any]]:
        """Return one row per worker, with the worker's entry for ``job``; omit workers that drained before they ended.

        ``history``: add ``spans``, the states of the worker for the job in the last ``HISTORY_S`` seconds.
        """
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
                **({"spans": self._histories[m.beat.service, m.beat.worker].rows(job, now)} if history else {}),
            }
            for m in self.everybody()
            if m.alive(now) or m.beat.ready
        ]


@dataclass(frozen=True, slots=True)
class PresenceChange:
    """Report that a worker was lost or has returned."""

    type: Literal["worker_lost", "worker_back"]
    service: str
    worker: str
    text: str

    @property
    def level(self) -> str:
        """Log level of the report."""
        return "warning" if self.type == "worker_lost" else "info"


class ProblemWatch:
    """Reports the problems that workers have with one job: each problem once, at most one per worker in ``PROBLEM_S``
    seconds."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._reported: dict[tuple[str, str], tuple[str, float]] = {}

    def new(self, members: Members, services: Collection[str], clock: float) -> list[tuple[str, str, str]]:
        """Return service, worker and text of problems to report now. ``clock``: seconds of any steady clock."""
        found = {
            (service, member.beat.worker): str(text)
            for service in services
            for member in members.of(service, clock)
            if (text := member.beat.jobs.get(self._job, {}).get("problem"))
        }
        recent = {key for key, (_, then) in self._reported.items() if clock - then < PROBLEM_S}
        self._reported = {key: one for key, one in self._reported.items() if key in found or key in recent}
        new = {
            key: text
            for key, text in found.items()
            if key not in recent and (key not in self._reported or self._reported[key][0] != text)
        }
        self._reported |= {key: (text, clock) for key, text in new.items()}
        return sorted((service, worker, text) for (service, worker), text in new.items())


class PresenceWatch:
    """Reports each loss and each return of a worker once. A worker that drained before it ended is not lost."""

    def __init__(self) -> None:
        self._present: set[tuple[str, str]] = set()
        self._lost: set[tuple[str, str]] = set()

    def changes(self, members: Members, services: Collection[str], clock: float) -> list[PresenceChange]:
        """Return the workers of ``services`` that were lost or have returned since the last call."""
        found: list[PresenceChange] = []
        for member in members.everybody():
            beat, who = member.beat, (member.beat.service, member.beat.worker)
            if beat.service not in services:
                continue
            if member.alive(clock):
                if who in self._lost:
                    found.append(PresenceChange("worker_back", *who, f"{beat.service} worker '{beat.worker}' is back"))
                self._lost.discard(who)
                self._present.add(who)
            elif who in self._present:
                self._present.discard(who)
                if beat.ready:
                    self._lost.add(who)
                    text = f"{beat.service} worker '{beat.worker}' gives no sign since {clock - member.heard:.1f} s"
                    found.append(PresenceChange("worker_lost", *who, text))
        return found
