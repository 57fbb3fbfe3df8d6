"""Protocol of a tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Run", "Tracker"]


@dataclass(frozen=True, slots=True)
class Run:
    """The job as trackers show it; ``directory`` is theirs to write to."""

    id: str
    name: str
    spec: dict[str, Any]
    directory: Path


class Tracker(Protocol):
    """Takes every row of a run from the first one on, whoever leads: a new leader writes them again.

    Methods block, and may raise anything that the package behind raises.
    """

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One row: values of update ``step`` at ``time`` (Unix seconds)."""
        ...

    def close(self) -> None:
        """Write what is buffered; the run is over, or another leader goes on."""
        ...
