"""Following a metric: when a run stops early, and which of its checkpoints is the best one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["EarlyStopConfig", "KeepBestConfig"]


class EarlyStopConfig(StrictModel):
    """End a run before its last update; it succeeds, and its message says why it ended.

    An evaluation that misses prompts (`eval/missing` above 0) does not count: it compares with no other.
    """

    metric: str = "reward/mean"
    """A metric of the updates, or one of the evaluations (`eval/greedy`, `eval/avg@k`, `eval/pass@k`; of one of
    several sources `eval/greedy/NAME` and so on)."""
    mode: Literal["max", "min"] = "max"
    """`max` if more is better, `min` if less is."""
    window: int = Field(1, ge=1)
    """The mean of this many newest values is looked at; there is no verdict before so many exist."""
    goal: float | None = None
    """Stop once the metric is at least (mode `min`: at most) this."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many values in a row without a new best."""
    min_delta: float = Field(0.0, ge=0)
    """A new best is better than the old one by more than this."""

    @model_validator(mode="after")
    def _has_a_rule(self) -> EarlyStopConfig:
        if self.goal is None and self.patience is None:
            raise ValueError("give goal or patience: nothing would ever stop the run")
        if self.patience is None and self.min_delta:
            raise ValueError("min_delta is only for patience")
        return self


class KeepBestConfig(StrictModel):
    """Ask for a checkpoint whenever a metric has a new best, and keep the best one beside the newest.

    The checkpoint of an evaluation holds exactly the weights that were evaluated. A metric of an update is known when
    the next one may have begun: its checkpoint is the first one after it. An evaluation that misses prompts
    (`eval/missing` above 0) is never the best.
    """

    metric: str
    """A metric of the updates, or one of the evaluations (`eval/greedy`, `eval/avg@k`, `eval/pass@k`; of one of
    several sources `eval/greedy/NAME` and so on)."""
    mode: Literal["max", "min"] = "max"
    """`max` if more is better, `min` if less is."""
