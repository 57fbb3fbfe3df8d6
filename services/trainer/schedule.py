"""The learning rate as a pure function of the position in the run: nothing to save, nothing to drift on resume."""

from __future__ import annotations

import math

from penstock.shared.config.job import OptimizerConfig
from penstock.shared.errors import ConfigError

__all__ = ["learning_rate"]


def learning_rate(config: OptimizerConfig, update_index: int, total_updates: int | None) -> float:
    """Learning rate of policy update ``update_index`` (from 0).

    Linear warmup over ``warmup_updates``, whose first update already moves (``peak / warmup``); then constant, linear
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
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
