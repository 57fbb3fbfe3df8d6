"""Which policy versions of an online job are served: bounds on what was measured of them."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.online.canary import CanaryConfig

__all__ = ["PromotionConfig"]


class PromotionConfig(StrictModel):
    """A version is served only if it keeps every bound that is given; `patience` says what follows if not."""

    max_drop: float | None = Field(None, ge=0)
    """The held-out reward (`metric`) may lie this far below that of the version served before; needs `data.eval`."""
    metric: str = "eval/greedy"
    """The held-out reward that `max_drop` compares."""
    max_kl: float | None = Field(None, gt=0)
    """Bound on `policy/kl_ref`, the KL to the reference policy; needs `algorithm.kl`."""
    min_entropy: float | None = None
    """Floor of `policy/entropy`, in nats per token."""
    max_mismatch: float | None = Field(None, gt=0)
    """Bound on `mismatch/kl` and `lag/kl`, the KL between what sampled the tokens and what trains on them."""
    patience: int = Field(1, ge=1)
    """After so many refused versions in a row training goes back to the version that is served."""
    canary: CanaryConfig | None = None
    """How a version that keeps the bounds is tried on live traffic before it is served to all; null: it is not."""

    @model_validator(mode="after")
    def _bounds_something(self) -> PromotionConfig:
        bounds = (self.max_drop, self.max_kl, self.min_entropy, self.max_mismatch, self.canary)
        if all(bound is None for bound in bounds):
            raise ValueError("give max_drop, max_kl, min_entropy, max_mismatch or canary, or leave the section out")
        return self
