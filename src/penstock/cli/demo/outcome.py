"""Outcome of a run of ``penstock demo``: the reward's rise to its goal, and the audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.cli.exits import FAILED, OK, result_code
from penstock.cli.jobs.audit import equation
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["FIRST", "GOAL", "LAST", "Outcome", "scores_of"]

GOAL = 0.9
"""Mean sampled reward, or share of successful episodes, that a demo with its default job file must reach."""
FIRST, LAST = 5, 10
"""Number of updates averaged at the start and at the end of the run; few at the start, where learning is fastest."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a finished run of the demo.

    ``rewards``: values of the metric that should reach ``goal``, oldest first; ``what``: name of this metric for users;
    ``goal``: None if the demo promises nothing for the job file; ``evaluations``: first and last value of each held-out
    metric; ``report``: audit of the job.
    """

    record: JobRecord
    rewards: Sequence[float]
    report: dict[str, Any]
    seconds: float
    data_dir: Path
    goal: float | None = GOAL
    what: str = "sampled reward"
    evaluations: dict[str, tuple[float, float]] = field(default_factory=dict)
    video: str = ""
    """Path of the last policy's video, or the reason why there is none; '' if the job records none."""

    @property
    def ends(self) -> tuple[float, float] | None:
        """Mean of ``rewards`` over the first updates (``FIRST`` of them) and over the last ones (``LAST``); None before
        the first update."""
        if not self.rewards:
            return None
        first, last = self.rewards[:FIRST], self.rewards[-LAST:]
        return sum(first) / len(first), sum(last) / len(last)

    @property
    def reached(self) -> bool:
        """True if the reward reached the goal, or if the demo has no goal."""
        return self.goal is None or (self.ends is not None and self.ends[1] >= self.goal)

    @property
    def held_out(self) -> str:
        """Kind of held-out data, as text: held-out episodes or held-out prompts."""
        return "held-out episodes" if self.record.spec.get("kind") == "embodied" else "held-out prompts"

    @property
    def code(self) -> int:
        """Exit code of the demo."""
        ended = result_code(self.record)
        return ended or (OK if self.report["ok"] and self.reached else FAILED)

    def flaws(self) -> list[str]:
        """Return the reasons why the run failed, for stderr."""
        flaws = []
        if self.record.status.phase != "succeeded":
            flaws.append(f"the job {self.record.status.phase}: {self.record.status.message}".rstrip(": "))
        if not self.reached:
            found = "no update was made" if self.ends is None else f"it was {self.ends[1]:.3f}"
            wanted = f"a mean {self.what} of at least {self.goal:g} over the last {LAST} updates"
            flaws.append(f"the goal was missed: {wanted}; {found}")
        if not self.report["ok"]:
            flaws.append("the audit failed: " + "; ".join(self.report["violations"][:3]))
        return flaws

    def plain(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        status, (first, last) = self.record.status, self.ends or (None, None)
        return {
            "ok": self.code == OK,
            "job": self.record.id,
            "name": self.record.name,
            "phase": status.phase,
            "message": status.message,
            "warnings": {warning.kind: warning.message for warning in status.warnings},
            "updates": status.step,
            "version": status.policy_version,
            "seconds": round(self.seconds, 1),
            "reward": {"first": first, "last": last, "goal": self.goal, "reached": self.reached},
            "evaluation": {name: {"first": a, "last": b} for name, (a, b) in self.evaluations.items()},
            "equation": self.report["equation"],
            "audit": self.report["ok"],
            "checkpoint": status.checkpoint,
            "video": self.video,
            "data_dir": str(self.data_dir),
        }

    def lines(self) -> list[str]:
        """Return the outcome as text."""
        status = self.record.status
        lines = ["", f"{self.record.name}: {status.phase} after {status.step} updates, {self.seconds:.0f} s in all"]
        if status.message:
            lines.append(f"  {status.message}")
        if self.ends is not None:
            goal = "" if self.goal is None else f"   (goal {self.goal:g}: {'reached' if self.reached else 'MISSED'})"
            lines.append(f"  {self.what:<15} {self.ends[0]:.3f} -> {self.ends[1]:.3f}{goal}")
        for name, (first, last) in self.evaluations.items():
            lines.append(f"  {name:<15} {first:.3f} -> {last:.3f}   ({self.held_out})")
        lines.append(f"  groups          {equation(self.report['equation'])}")
        lines.append(f"  audit           {'passed' if self.report['ok'] else 'FAILED, see: penstock audit'}")
        lines.append(f"  checkpoint      {status.checkpoint or 'none'}")
        if self.video:
            lines.append(f"  video           {self.video}")
        lines.append(f"  logs            {self.data_dir / 'logs'}")
        lines += [f"  warning         {warning.kind}: {warning.message}" for warning in status.warnings]
        return lines


def scores_of(series: dict[str, list[float | None]]) -> dict[str, tuple[float, float]]:
    """Return first and last value of each held-out metric, without durations and without metrics that are always 0."""
    names = [name for name in series if name.startswith("eval/") and not name.endswith("seconds")]
    known = {name: [value for value in series[name] if value is not None] for name in names}
    return {name: (values[0], values[-1]) for name, values in known.items() if any(values)}
