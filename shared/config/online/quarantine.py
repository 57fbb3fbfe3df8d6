"""When feedback is held back because it is unlike what its source said before."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["QuarantineConfig"]


class QuarantineConfig(StrictModel):
    """Feedback of one source (API key) on one metric is compared with what the same source said of it before."""

    window: int = Field(200, ge=10, le=10_000)
    """Newest values of a source and metric that make up what is usual."""
    min_items: int = Field(30, ge=10)
    """Nothing is held back before a source has given so many values of a metric."""
    max_deviation: float = Field(6.0, gt=0)
    """A float is held that lies further from the median than this many standard deviations, estimated by the MAD."""
    max_drift: float = Field(4.0, gt=0)
    """Everything is held while the source's moving average is further from its usual mean than so many of its own
    standard deviations."""
    smoothing: float = Field(0.1, gt=0, le=1)
    """Weight of the newest value in the moving average."""
    hold_s: float = Field(86400.0, gt=0)
    """Held items that nobody releases or drops within this time are rejected; sooner where room is needed."""

    @model_validator(mode="after")
    def _window_holds_the_minimum(self) -> QuarantineConfig:
        if self.min_items > self.window:
            raise ValueError(f"min_items: {self.min_items} values do not fit in a window of {self.window}")
        return self
