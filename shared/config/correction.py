"""Options of every algorithm: shaping of rewards, KL to a reference, correction of the sampler's log-probs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = [
    "AdaptiveKL",
    "IcepopConfig",
    "ImportanceConfig",
    "KLConfig",
    "OverlongPunishment",
    "RewardShaping",
    "TISConfig",
]


class AdaptiveKL(StrictModel):
    """The coefficient follows a target (arXiv 1909.08593, §2.2)."""

    target: float = Field(gt=0)
    """KL per sequence in nats that the coefficient steers to."""
    horizon: float = Field(10_000, gt=0)
    """Sequences after which an error of 20 % has changed the coefficient by about 20 %."""


class KLConfig(StrictModel):
    """KL(policy || reference): the reference is the policy at version 0 or its last reset, or another model."""

    coef: float = Field(gt=0)
    """Weight of the KL; the first one where `adaptive` is set."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward of each token before advantages."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """k1, k2, k3 of each sampled token (Schulman, 2020), or the exact sum over the vocabulary; in the reward: k1.
    k3 is cut at 10, beyond which a token has no gradient: where the policy falls below 1/13.6 of the reference's
    probability, k3 stops pulling it back; k2 and `full` never do."""
    adaptive: AdaptiveKL | None = None
    """Adapt the coefficient after each update; null keeps it."""
    reference: str | None = None
    """Directory or hub id of a reference model of the policy's shape and vocabulary; null: the policy at version 0."""
    reset_reference_every: int | None = Field(None, ge=1)
    """Updates after which the present policy becomes the reference; null never."""

    @model_validator(mode="before")
    @classmethod
    def _k1_in_the_reward(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("place") == "reward":
            return {"estimator": "k1", **data}
        return data

    @model_validator(mode="after")
    def _estimator_fits_the_place(self) -> KLConfig:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError("estimator k1 has no gradient in the loss but noise: use k2, k3 or full, or place: reward")
        if self.place == "reward" and self.estimator == "full":
            raise ValueError("estimator full is a term of the loss: with place: reward use k1, k2 or k3")
        return self


class TISConfig(StrictModel):
    """Truncated importance sampling: weights min(trainer / sampler, high)."""

    type: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or the product over the sequence for all its tokens."""
    high: float = Field(2.0, gt=1)
    """Largest weight."""


class IcepopConfig(StrictModel):
    """Masked importance sampling (IcePop, arXiv 2510.18855): weights outside the bounds become 0."""

    type: Literal["icepop"] = "icepop"
    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or the product over the sequence for all its tokens."""
    low: float = Field(0.5, ge=0, lt=1)
    """Smallest weight that is kept."""
    high: float = Field(5.0, gt=1)
    """Largest weight that is kept."""


ImportanceConfig = Annotated[TISConfig | IcepopConfig, Field(discriminator="type")]


class RewardShaping(StrictModel):
    """Rewards before advantages: normalised, scaled, clipped, in this order."""

    normalise: bool = False
    """Subtract the running mean and divide by the running deviation of all rewards of the run so far."""
    scale: float = Field(1.0, gt=0)
    """Factor."""
    clip: tuple[float, float] | None = None
    """Smallest and largest reward."""

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> RewardShaping:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {list(self.clip)} must name the smaller bound first")
        return self


class OverlongPunishment(StrictModel):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), added to the shaped reward."""

    buffer: float = Field(0.2, gt=0, le=1)
    """Last part of max_new_tokens over which the punishment grows from 0 to its full size."""
    coef: float = Field(1.0, gt=0)
    """Full size."""
