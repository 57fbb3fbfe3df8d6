"""Losses for data that may not be used on-policy: answers to imitate, and answers to prefer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["OffPolicyConfig", "PreferenceConfig", "SupervisedConfig"]


class SupervisedConfig(StrictModel):
    """Imitation: cross-entropy on corrections, demonstrations, and good answers that no policy loss may use."""

    coef: float = Field(0.1, gt=0)
    """Weight of the loss, which is a mean over the tokens of all such answers of the minibatch."""
    min_reward: float = 0.0
    """Answers that are too old for the policy loss, or whose sampler is not known, are imitated from this reward on."""


class PreferenceConfig(StrictModel):
    """Preferences between two answers to the same prompt."""

    type: Literal["dpo"] = "dpo"
    """Direct preference optimization (arXiv 2305.18290)."""
    coef: float = Field(0.1, gt=0)
    """Weight of the loss, which is a mean over the pairs of the minibatch."""
    beta: float = Field(0.1, gt=0)
    """How strongly the frozen reference holds: the policy at version 0, or the one that `algorithm.kl` has."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a pair was labelled the wrong way round."""
    normalise: bool = False
    """Compare means over tokens instead of sums, so that long answers weigh no more than short ones."""


class OffPolicyConfig(StrictModel):
    """Losses beside the policy loss, for material that may not be used on-policy."""

    supervised: SupervisedConfig | None = None
    """Imitate corrections, demonstrations and good answers; null rejects them."""
    preference: PreferenceConfig | None = None
    """Learn from preferences; null rejects them."""
    max_share: float = Field(0.5, gt=0, le=1)
    """At most this many times `train.batch_size` of an update's groups are of this kind."""
