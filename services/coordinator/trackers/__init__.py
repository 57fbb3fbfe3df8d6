"""Trackers: each writes a job's rows of metrics to an experiment tracking tool, through the protocol ``Tracker``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from penstock.services.coordinator.trackers.base import Run, Tracker
from penstock.services.coordinator.trackers.swanlab import open_swanlab
from penstock.services.coordinator.trackers.tensorboard import open_tensorboard
from penstock.services.coordinator.trackers.wandb import open_wandb
from penstock.shared.config.tracking import TrackerConfig
from penstock.shared.errors import ConfigError

__all__ = ["Run", "Tracker", "check_trackers", "open_tracker"]

_OPENERS: dict[str, Callable[[Any, Run], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "swanlab": open_swanlab,
}
"""Functions that open a tracker, by the type of the tracker, which is also the name of its Python package."""


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Raise ConfigError for a tracker whose package is not installed beside the coordinator."""
    for place, config in enumerate(configs):
        if find_spec(config.type) is None:
            raise ConfigError(
                f"tracking[{place}]: the package '{config.type}' is not installed beside the coordinator "
                f"(pip install {config.type})"
            )


def open_tracker(config: TrackerConfig, run: Run) -> Tracker:
    """Open a tracker. This may use the network and blocks: call it, and all of its methods, in one thread."""
    return _OPENERS[config.type](config, run)
