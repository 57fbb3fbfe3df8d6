"""One config class per algorithm, told apart by ``type``. A key an algorithm does not use does not exist here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["AlgorithmConfig", "GRPOConfig"]


class GRPOConfig(StrictModel):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, eq. 3 and §4.1.2)."""

    type: Literal["grpo"] = "grpo"
    group_size: int = Field(8, ge=2)
    """Completions of each prompt, G."""
    min_group: int | None = Field(None, ge=2)
    """A group with fewer trajectories that did not fail is dropped and redrawn; default: group_size / 2, at least 2."""
    scale_by_std: bool = True
    """Divide by the group's standard deviation (unbiased, + 1e-6); false is Dr. GRPO's advantage (arXiv 2503.20783)."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Denominator of the loss: tokens of the minibatch, tokens of each sequence then sequences, or max_new_tokens."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy) in the loss; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (Schulman, 2020)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    @model_validator(mode="after")
    def _min_group_fits(self) -> GRPOConfig:
        if self.min_group is not None and self.min_group > self.group_size:
            raise ValueError(f"min_group {self.min_group} is larger than group_size {self.group_size}")
        return self

    @property
    def smallest_group(self) -> int:
        """Fewest trajectories with which a group still trains."""
        return self.min_group if self.min_group is not None else max(2, self.group_size // 2)


AlgorithmConfig = GRPOConfig
