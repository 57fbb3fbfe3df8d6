"""Optimizers and their learning-rate schedules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["OptimizerConfig", "Schedule"]

Schedule = Literal["constant", "linear", "cosine"]


class OptimizerConfig(StrictModel):
    """AdamW and its learning-rate schedule."""

    type: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the moments in 8 bits (needs bitsandbytes; backend `local` only): 2 bytes per weight
    instead of 8."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, applied to matrices only, not to norms, biases and embeddings."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping: largest global norm."""
    schedule: Schedule = "constant"
    """Shape of the learning-rate decay after warmup, over max_updates."""
    warmup_updates: int = Field(0, ge=0)
    """Updates of linear learning-rate warmup. A job that starts from a checkpoint of another job (`job:NAME@final`) and
    leaves this out has 10, or half of its `max_updates` if that is less."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
