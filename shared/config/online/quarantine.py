"""Quarantine of feedback that deviates from earlier feedback of its source."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["QuarantineConfig"]


class QuarantineConfig(StrictModel):
    """Outlier detection per source (API key) and metric: feedback is compared with earlier feedback of that source."""

    window: int = Field(200, ge=10, le=10_000)
    """Number of newest values of a source and metric that define the usual range."""
    min_items: int = Field(30, ge=10)
    """Number of values of a metric that a source must have given before a value of this metric can be held."""
    max_deviation: float = Field(6.0, gt=0)
    """A float is held if its distance from the median exceeds this many standard deviations, estimated by the MAD."""
    max_drift: float = Field(4.0, gt=0)
    """All values of a source are held while its moving average deviates from its usual mean by more than this many
    standard deviations of that average."""
    smoothing: float = Field(0.1, gt=0, le=1)
    """Weight of the newest value in the moving average."""
    hold_s: float = Field(86400.0, gt=0)
    """Time (seconds) after which held items are rejected if no user has released or dropped them; sooner if the stream
    runs out of space."""

    @model_validator(mode="after")
    def _window_holds_the_minimum(self) -> QuarantineConfig:
        if self.min_items > self.window:
            raise ValueError(f"min_items: {self.min_items} values do not fit in a window of {self.window}")
        return self
