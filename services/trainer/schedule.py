"""The learning rate as a pure function of the update index, so that checkpoints need not store its state."""

from __future__ import annotations

import math

from penstock.shared.config.optimizer import OptimizerConfig, Schedule
from penstock.shared.errors import ConfigError

__all__ = ["decay", "learning_rate"]


def learning_rate(config: OptimizerConfig, update_index: int, total_updates: int | None) -> float:
    """Return the learning rate of policy update ``update_index`` (from 0).

    Linear warmup over ``warmup_updates``, whose first update has rate ``peak / warmup``; then constant, linear
    or cosine decay (arXiv 1608.03983, eq. 5, without restarts) towards ``min_lr_ratio`` at ``total_updates``.

    Raises:
        ConfigError: the schedule decays and the length of the run is not known.
    """
    if update_index < config.warmup_updates:
        return config.learning_rate * (update_index + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    if total_updates is None:
        raise ConfigError(f"optimizer.schedule: '{config.schedule}' decays over the run, so it needs train.max_updates")
    decay_updates = max(1, total_updates - config.warmup_updates)
    progress = min(1.0, (update_index - config.warmup_updates) / decay_updates)
    return config.learning_rate * decay(config.schedule, progress, config.min_lr_ratio)


def decay(schedule: Schedule, progress: float, min_ratio: float) -> float:
    """Return the learning rate at ``progress`` (0 to 1) of the decay, as a fraction of the peak rate: 1 to
    ``min_ratio``."""
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            shape = 1 - progress
        case "cosine":
            shape = (1 + math.cos(math.pi * progress)) / 2
    return min_ratio + (1 - min_ratio) * shape
