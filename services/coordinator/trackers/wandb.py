"""Tracker for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.services.coordinator.trackers.base import Run
from penstock.shared.config.tracking import WandbTracker

__all__ = ["open_wandb"]


class _Wandb:
    def __init__(self, config: WandbTracker, run: Run) -> None:
        import wandb

        run.directory.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            id=run.id, name=run.name, project=config.project, entity=config.entity, mode=config.mode,
            config=run.spec, dir=str(run.directory), resume="allow",
        )  # fmt: skip
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See ``Tracker.write``. The x-axis is the metric `update`, because W&B's own steps only count rows."""
        self._run.log({"update": step, **values})

    def close(self) -> None:
        """See ``Tracker.close``."""
        self._run.finish()


def open_wandb(config: WandbTracker, run: Run) -> _Wandb:
    """Open a run with the job's id, so that a later leader of the job resumes the same run."""
    return _Wandb(config, run)
