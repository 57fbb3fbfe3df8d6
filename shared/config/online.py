"""How a job learns from live interactions: declared metrics, admission, batches, defences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.off_policy import OffPolicyConfig
from penstock.shared.config.posted import PostedConfig
from penstock.shared.config.promotion import PromotionConfig
from penstock.shared.config.quarantine import QuarantineConfig

__all__ = ["MetricConfig", "OnlineConfig"]

RESERVED_METRICS = frozenset({"comment", "demonstration"})
"""Names of feedback that is text: never a reward by itself."""


class MetricConfig(StrictModel):
    """One declared metric of feedback."""

    type: Literal["boolean", "float"]
    """What its values are."""
    level: Literal["interaction", "episode"] = "interaction"
    """What it judges; an episode's metric goes to its last interaction."""
    when_true: float = 1.0
    """Reward of `true` (boolean metrics)."""
    when_false: float = -1.0
    """Reward of `false` (boolean metrics)."""
    weight: float = 1.0
    """Factor in the sum over metrics."""
    clip: tuple[float, float] = (-1.0, 1.0)
    """Bounds of the weighted value; a float outside ten times these is refused as an error of its sender."""
    default_after_s: float | None = Field(None, gt=0)
    """Missing this long after the interaction, the metric counts as `default_value`; null: it is waited for."""
    default_value: bool | float = 0.0
    """What a missing metric counts as."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> MetricConfig:
        if self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip: {self.clip[0]:g} is not below {self.clip[1]:g}")
        return self


class OnlineConfig(StrictModel):
    """How live interactions become training data."""

    metrics: dict[str, MetricConfig] = Field(default_factory=lambda: {"reward": MetricConfig(type="float")})
    """Declared metrics by name; feedback that names another one is refused. `reward` is a float unless declared."""
    max_wait_s: float = Field(60.0, gt=0)
    """A smaller batch is trained once its oldest member has waited this long; with shares, the oldest of two owners."""
    match_ttl_s: float = Field(900.0, gt=0)
    """Feedback whose interaction does not appear within this time expires."""
    idle_ttl_s: float = Field(1800.0, gt=0)
    """An episode without a request for this long is over."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later rewards over the turns of an episode."""
    invalid_reward: float | None = None
    """Reward of a completion whose tool calls cannot be parsed; null: the lowest bound of the metrics."""
    max_share_per_key: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch that one key judged; an answer that nobody judged counts for the key that asked."""
    max_share_per_asker: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch that was answered to one key."""
    max_share_per_user: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch whose feedback came from one user."""
    raters: Literal["any", "same_key"] = "any"
    """Whose feedback counts: that of `any` key that may post it, or only of the key that the answer was served to."""
    off_policy: OffPolicyConfig | None = None
    """What is learnt from what may not be used on-policy; null: nothing."""
    posted: PostedConfig = PostedConfig()
    """What posted interactions may be used for."""
    hold_s: float = Field(30.0, gt=0)
    """How long a request waits for weights or a free worker before the client is told to come back."""
    promotion: PromotionConfig | None = None
    """When a new version is served; null: as soon as it is trained."""
    quarantine: QuarantineConfig | None = None
    """When feedback is held back for somebody to look at; null: never."""
