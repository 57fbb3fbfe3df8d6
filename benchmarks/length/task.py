"""Question of a benchmark of lengths: a job, arms that change it, and what their runs are expected to show."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from report import Report

from length.loop import Lengths

__all__ = ["EXAMPLES", "Arm", "Run", "Task", "mean"]

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "ragged"


@dataclass(frozen=True)
class Arm:
    """``changes`` of the algorithm of the job file; ``cut_off_fails`` as in ``Loop``."""

    changes: dict[str, Any] = field(default_factory=dict)
    cut_off_fails: bool = False


@dataclass
class Run:
    """One arm of one seed. ``updates`` are of the training batches, the other two of held-out prompts."""

    arm: str
    seed: int
    updates: list[Lengths]
    start: Lengths
    end: Lengths
    seconds: float

    @classmethod
    def load(cls, record: dict[str, Any]) -> Run:
        """Inverse of ``asdict``."""
        updates = [Lengths(**lengths) for lengths in record["updates"]]
        ends = {when: Lengths(**record[when]) for when in ("start", "end")}
        return cls(**{**record, "updates": updates, **ends})


@dataclass(frozen=True)
class Task:
    """A job file and what is done with it."""

    title: str
    example: Path
    arms: Mapping[str, Arm]
    columns: list[str]
    fill: Callable[[Report, list[Run]], None]
    """Rows and checks of the finished runs."""
    panels: Mapping[str, str]
    """Fields of ``Lengths`` to draw, with the label of their axis."""

    def job_of(self, arm: str) -> dict[str, Any]:
        """The example with the arm's changes; those to another type keep nothing but the size of a group."""
        spec: dict[str, Any] = yaml.safe_load(self.example.read_text())
        changes, kept = self.arms[arm].changes, spec["algorithm"]
        if "type" in changes:
            kept = {"group_size": kept["group_size"]}
        return {**spec, "algorithm": {**kept, **changes}}


def mean(runs: list[Run], when: str, what: str) -> float:
    """Over runs, of a field at ``start`` or ``end``; not a number where no run has it."""
    values = [getattr(getattr(run, when), what) for run in runs]
    return statistics.fmean([value for value in values if value is not None] or [float("nan")])
