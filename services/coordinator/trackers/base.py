"""Protocol of a tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Run", "Tracker"]


@dataclass(frozen=True, slots=True)
class Run:
    """Description of a job for trackers, which may write files to ``directory``."""

    id: str
    name: str
    spec: dict[str, Any]
    directory: Path


class Tracker(Protocol):
    """Receives every row of a run from the first one on; a new leader writes all rows again.

    Methods block, and may raise any exception of the tool's package.
    """

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Write one row: values of update ``step`` at ``time`` (Unix seconds)."""
        ...

    def close(self) -> None:
        """Flush buffered rows, at the end of the run or when another leader takes over."""
        ...
