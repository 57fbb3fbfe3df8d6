"""Options shared by algorithms: reward shaping, KL to a reference, importance correction of sampled log-probs."""

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
    """Adaptive KL coefficient that steers the KL to a target (arXiv 1909.08593, §2.2)."""

    target: float = Field(gt=0)
    """Target KL per sequence, in nats."""
    horizon: float = Field(10_000, gt=0)
    """Number of sequences after which the coefficient has changed by about 20 %, if the KL is 20 % above or below its
    target."""


class KLConfig(StrictModel):
    """Penalty KL(policy || reference). The reference is the policy at version 0, the policy at the last reset of the
    reference, or another model."""

    coef: float = Field(gt=0)
    """Weight of the KL; with `adaptive`, its initial value."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss; `reward`: subtracted from the reward of each token before advantages are computed."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """Estimator: k1, k2 or k3 of each sampled token (Schulman, 2020), or `full`, the exact sum over the vocabulary. k1
    is only for `place: reward`, where it is the default; `full` is only for `place: loss`. k3 is clipped at 10, beyond
    which a token has no gradient: once the policy's probability falls below 1/13.6 of the reference's, k3 no longer
    pulls it back; k2 and `full` always do."""
    adaptive: AdaptiveKL | None = None
    """Adaptation of the coefficient after each update; null: constant coefficient."""
    reference: str | None = None
    """Directory or hub id of a reference model with the policy's architecture and vocabulary; null: the policy at
    version 0."""
    reset_reference_every: int | None = Field(None, ge=1)
    """Number of updates between resets of the reference, each of which makes the current policy the reference; null: no
    resets."""

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
    """Truncated importance sampling: weights min(p_trainer / p_sampler, high), from the probabilities that trainer and
    sampler compute."""

    type: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """`token`: one weight per token; `sequence`: the product over the sequence, applied to all its tokens."""
    high: float = Field(2.0, gt=1)
    """Upper bound of the weights."""


class IcepopConfig(StrictModel):
    """Masked importance sampling (IcePop, arXiv 2510.18855): weights outside the bounds are set to 0."""

    type: Literal["icepop"] = "icepop"
    level: Literal["token", "sequence"] = "token"
    """`token`: one weight per token; `sequence`: the product over the sequence, applied to all its tokens."""
    low: float = Field(0.5, ge=0, lt=1)
    """Smallest weight that is not masked."""
    high: float = Field(5.0, gt=1)
    """Largest weight that is not masked."""


ImportanceConfig = Annotated[TISConfig | IcepopConfig, Field(discriminator="type")]


class RewardShaping(StrictModel):
    """Transformation of rewards before advantages are computed: normalise, scale, clip, in this order."""

    normalise: bool = False
    """Subtract the running mean of all rewards of the run so far and divide by their running standard deviation."""
    scale: float = Field(1.0, gt=0)
    """Factor applied to rewards."""
    clip: tuple[float, float] | None = None
    """Lower and upper bound of rewards; null: no clipping."""

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> RewardShaping:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {list(self.clip)} must name the smaller bound first")
        return self


class OverlongPunishment(StrictModel):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), added to the shaped reward."""

    buffer: float = Field(0.2, gt=0, le=1)
    """Length of the range below max_new_tokens in which the punishment grows linearly from 0 to `coef`, as a fraction
    of max_new_tokens."""
    coef: float = Field(1.0, gt=0)
    """Largest punishment, which a completion of max_new_tokens gets."""
