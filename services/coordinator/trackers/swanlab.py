"""Tracker for SwanLab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.services.coordinator.trackers.base import Run
from penstock.shared.config.tracking import SwanLabTracker

__all__ = ["open_swanlab"]


class _SwanLab:
    def __init__(self, config: SwanLabTracker, run: Run) -> None:
        import swanlab

        run.directory.mkdir(parents=True, exist_ok=True)
        self._swanlab: Any = swanlab
        swanlab.init(
            project=config.project, workspace=config.workspace, experiment_name=run.name, mode=config.mode,
            config=run.spec, logdir=str(run.directory),
        )  # fmt: skip

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See ``Tracker.write``."""
        self._swanlab.log(dict(values), step=step)

    def close(self) -> None:
        """See ``Tracker.close``."""
        self._swanlab.finish()


def open_swanlab(config: SwanLabTracker, run: Run) -> _SwanLab:
    """Open an experiment for this run."""
    return _SwanLab(config, run)
