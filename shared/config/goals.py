"""Goals on a metric: early stopping, and the choice of the best checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["EarlyStopConfig", "KeepBestConfig"]


class EarlyStopConfig(StrictModel):
    """Early stopping: the job ends before it has made all its updates. It then counts as succeeded, and its message
    gives the reason.

    Evaluations that miss prompts (`eval/missing` above 0) are ignored, because they are not comparable.
    """

    metric: str = "reward/mean"
    """Metric of the updates, or of the evaluations (`eval/greedy`, `eval/avg@k`, `eval/pass@k`; for one of several
    sources `eval/greedy/NAME` and so on)."""
    mode: Literal["max", "min"] = "max"
    """`max` if larger is better, `min` if smaller is better."""
    window: int = Field(1, ge=1)
    """Moving average: number of newest values whose mean is compared. Before the metric has so many values, nothing is
    compared."""
    goal: float | None = None
    """Stop once the metric is at least (mode `min`: at most) this; null: no goal."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many consecutive values without a new best; null: never."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest improvement that counts as a new best."""

    @model_validator(mode="after")
    def _has_a_rule(self) -> EarlyStopConfig:
        if self.goal is None and self.patience is None:
            raise ValueError("give goal or patience: nothing would ever stop the run")
        if self.patience is None and self.min_delta:
            raise ValueError("min_delta is only for patience")
        return self


class KeepBestConfig(StrictModel):
    """Best checkpoint: request a checkpoint whenever a metric has a new best value, and keep the best checkpoint as
    well as the newest.

    The checkpoint of an evaluation has exactly the weights that were evaluated. When the metric of an update is known,
    the next update may already have begun, so the checkpoint for an update is the first one written after it. An
    evaluation that misses prompts (`eval/missing` above 0) is never the best.
    """

    metric: str
    """Metric of the updates, or of the evaluations (`eval/greedy`, `eval/avg@k`, `eval/pass@k`; for one of several
    sources `eval/greedy/NAME` and so on)."""
    mode: Literal["max", "min"] = "max"
    """`max` if larger is better, `min` if smaller is better."""
