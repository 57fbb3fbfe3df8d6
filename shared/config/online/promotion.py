"""Promotion gate of an online job: bounds that a new version must meet to be served."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.online.canary import CanaryConfig

__all__ = ["PromotionConfig"]


class PromotionConfig(StrictModel):
    """Promotion gate: a version is served only if it meets every bound that is set."""

    max_drop: float | None = Field(None, ge=0)
    """Largest allowed amount by which the held-out reward (`metric`) is below that of the previously served version;
    needs `data.eval`. null: no bound."""
    metric: str = "eval/greedy"
    """Held-out reward that `max_drop` compares."""
    max_kl: float | None = Field(None, gt=0)
    """Upper bound of `policy/kl_ref`, the KL to the reference policy; needs `algorithm.kl`. null: no bound."""
    min_entropy: float | None = None
    """Lower bound of `policy/entropy` (nats per token); null: no bound."""
    max_mismatch: float | None = Field(None, gt=0)
    """Upper bound of `mismatch/kl` and `lag/kl`, the KL between the sampling policy and the trained one; null: no
    bound."""
    patience: int = Field(1, ge=1)
    """After this many consecutive refused versions, training rolls back to the served version."""
    canary: CanaryConfig | None = None
    """Canary trial of versions that meet the bounds; null: a version that meets the bounds is served to all at once."""

    @model_validator(mode="after")
    def _bounds_something(self) -> PromotionConfig:
        bounds = (self.max_drop, self.max_kl, self.min_entropy, self.max_mismatch, self.canary)
        if all(bound is None for bound in bounds):
            raise ValueError("give max_drop, max_kl, min_entropy, max_mismatch or canary, or leave the section out")
        return self
