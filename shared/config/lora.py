"""Low-rank adapters (LoRA)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["LoraConfig"]


class LoraConfig(StrictModel):
    """Adapters of the policy's linear layers (LoRA, arXiv 2106.09685). The policy's own weights stay frozen.

    There is no dropout: the sampler would not apply it, and log-probs of trainer and sampler must agree.
    """

    rank: int = Field(16, ge=1, le=1024)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale: updates are multiplied by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers inside a block that get an adapter, such as `q_proj`; default: all of them."""
    publish: Literal["adapters", "merged"] = "adapters"
    """Published weights: only the adapters, or the merged model for engines without adapter support."""
