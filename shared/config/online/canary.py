"""Canary trial: a new version serves a share of live traffic before it serves all."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["CanaryConfig"]


class CanaryConfig(StrictModel):
    """Canary trial of a version that meets the bounds of the promotion gate. At first it answers only a share of the
    conversations. The feedback on these conversations decides if the version then answers all."""

    share: float = Field(0.1, gt=0, le=0.5)
    """Share of conversations that the new version answers; a request without an episode counts as one conversation."""
    conversations: int = Field(100, ge=10)
    """Number of judged conversations of each of the two versions, needed for a verdict."""
    max_drop: float = Field(0.1, ge=0)
    """Largest allowed amount by which the new version's mean reward per conversation is below the served version's."""
    confidence: float = Field(0.95, ge=0.5, lt=1)
    """Confidence level of the one-sided Welch bound of the difference between the two mean rewards; 0.5 only compares
    the means."""
    max_wait_s: float = Field(3600.0, gt=0)
    """Time after which `on_timeout` decides (seconds)."""
    on_timeout: Literal["refuse", "promote"] = "refuse"
    """Verdict on a version with too little feedback. `promote`: serve it, unless the feedback so far shows that it is
    worse by more than `max_drop`."""
