"""Losses for off-policy data: answers to imitate, and preferences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["OffPolicyConfig", "PreferenceConfig", "SupervisedConfig"]


class SupervisedConfig(StrictModel):
    """Imitation: cross-entropy on corrections, demonstrations, and good answers that the policy loss cannot use."""

    coef: float = Field(0.1, gt=0)
    """Weight of the loss, which is a mean over the tokens of all imitated answers of the minibatch."""
    min_reward: float = 0.0
    """Smallest reward at which answers that are too old for the policy loss, or whose sampling policy is unknown,
    are imitated."""


class PreferenceConfig(StrictModel):
    """Loss that learns from preferences between two answers to the same prompt."""

    type: Literal["dpo"] = "dpo"
    """Direct preference optimization (arXiv 2305.18290)."""
    coef: float = Field(0.1, gt=0)
    """Weight of the loss, which is a mean over the pairs of the minibatch."""
    beta: float = Field(0.1, gt=0)
    """Strength of the constraint to the frozen reference, which is the policy at version 0 or the reference of
    `algorithm.kl`."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that the two answers of a pair are swapped."""
    normalise: bool = False
    """Compare mean log-probs per token instead of sums, so that long answers have no larger weight."""


class OffPolicyConfig(StrictModel):
    """Losses in addition to the policy loss, for data that the policy loss cannot use."""

    supervised: SupervisedConfig | None = None
    """Imitate corrections, demonstrations and good answers; null rejects them."""
    preference: PreferenceConfig | None = None
    """Learn from preferences; null rejects them."""
    max_share: float = Field(0.5, gt=0, le=1)
    """Largest number of off-policy groups in an update, as a multiple of `train.batch_size`."""
