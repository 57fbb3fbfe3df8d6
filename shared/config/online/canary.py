"""How a version is tried on a share of live traffic before it is served to all."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["CanaryConfig"]


class CanaryConfig(StrictModel):
    """A version that keeps the other bounds answers some conversations first; their feedback decides."""

    share: float = Field(0.1, gt=0, le=0.5)
    """Share of the conversations that it answers; a request without an episode is a conversation."""
    conversations: int = Field(100, ge=10)
    """So many judged conversations of each arm decide."""
    max_drop: float = Field(0.1, ge=0)
    """Its mean reward per conversation may lie this far below that of the version served."""
    confidence: float = Field(0.95, ge=0.5, lt=1)
    """How sure that must be: level of the one-sided Welch bound of the difference; 0.5 compares the means."""
    max_wait_s: float = Field(3600.0, gt=0)
    """After this long `on_timeout` decides."""
    on_timeout: Literal["refuse", "promote"] = "refuse"
    """Verdict on a version with too little feedback; `promote`: unless that little shows it to be worse."""
