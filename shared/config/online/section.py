"""How a job learns from live interactions: declared metrics, admission, batches, defences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.online.canary import CanaryConfig
from penstock.shared.config.online.off_policy import OffPolicyConfig
from penstock.shared.config.online.promotion import PromotionConfig
from penstock.shared.config.online.quarantine import QuarantineConfig
from penstock.shared.config.online.redaction import RedactionConfig

__all__ = [
    "RESERVED_METRICS",
    "REWARD",
    "STANDARD",
    "Defences",
    "Level",
    "MetricConfig",
    "NewSourcesConfig",
    "OnlineConfig",
    "PostedConfig",
    "with_defences",
]


class PostedConfig(StrictModel):
    """Uses of posted interactions beside imitation."""

    trusted_keys: list[str] = Field(default_factory=list, max_length=64)
    """Ids of the API keys whose posted tokens the policy loss may use; `*`: of every key that may post feedback."""
    audit_share: float = Field(0.05, ge=0, le=1)
    """Share of the posted interactions with log-probs that a rollout worker computes again."""
    max_logprob_gap: float = Field(0.1, gt=0)
    """Mean difference of posted and computed log-probs beyond which a key is not believed any more in this job."""
    held_versions: int = Field(0, ge=0, le=16)
    """Versions before the newest one whose weights each rollout worker keeps in host memory, to compute log-probs of
    posted answers under them; each takes as much room as what is published (the model, or its adapters)."""
    assume_on_policy: bool = False
    """Take answers without log-probs as if the newest policy had written them; only for agents that serve it."""
    max_assumed_share: float = Field(0.25, gt=0, le=0.25)
    """Largest share of `train.batch_size` that is assumed."""
    assumed_weight: float = Field(0.5, gt=0, le=1)
    """Factor of the advantages of what is assumed."""


class NewSourcesConfig(StrictModel):
    """A source is an API key. It is new until it has judged enough of the answers that reference keys judged, too."""

    reference_keys: list[str] = Field(min_length=1, max_length=64)
    """Ids of the API keys that are believed from the start: an automatic judge, people who audit."""
    weight: float = Field(0.2, gt=0, le=1)
    """Factor of the advantages of what a new source judged."""
    items: int = Field(30, ge=10)
    """So many values of a source about which a reference key said something are needed to know it."""
    agreement: float = Field(0.4, gt=0, le=1)
    """Smallest concordance of a source with the reference keys; for yes and no that is Cohen's kappa."""


Defences = Literal["standard", "none"]

STANDARD: Mapping[str, Any] = {
    "raters": "same_key",
    "max_share_per_key": 0.2,
    "max_share_per_user": 0.02,
    "quarantine": {},
    "promotion": {"max_mismatch": 0.05, "min_entropy": 0.02},
}
"""A few per cent of poisoned preferences steer a model (Best-of-Venom, arXiv 2404.05530): no user may have so many.
The bounds of the gate need no data that is held out: a collapsed policy, or one far from its samples, is not served."""


def with_defences(data: Any) -> Any:
    """The section `online` as it was written, and of `standard` whatever it does not say itself."""
    if not isinstance(data, Mapping) or data.get("defences") != "standard":
        return data
    written = {name: _under(STANDARD[name], value) for name, value in data.items() if name in STANDARD}
    return {**STANDARD, **data, **written}


def _under(preset: Any, written: Any) -> Any:
    """A section that is written in part keeps the rest of the preset."""
    return {**preset, **written} if isinstance(preset, Mapping) and isinstance(written, Mapping) else written


Level = Literal["interaction", "episode"]
REWARD = "reward"
"""Feedback of this name counts in every job, declared or not."""

RESERVED_METRICS = frozenset({"comment", "demonstration"})
"""Names of feedback that is text: never a reward by itself."""


class MetricConfig(StrictModel):
    """One declared metric of feedback."""

    type: Literal["boolean", "float"]
    """Type of its values."""
    level: Level = "interaction"
    """Its target; an episode's metric goes to the last interaction of each of its branches."""
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
    """Value of a missing metric."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> MetricConfig:
        if self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip: {self.clip[0]:g} is not below {self.clip[1]:g}")
        return self


UNDECLARED_REWARD = MetricConfig(type="float")
"""Definition of `reward` in a job that does not declare it."""


class OnlineConfig(StrictModel):
    """How live interactions become training data."""

    metrics: dict[str, MetricConfig] = Field(default_factory=lambda: {REWARD: UNDECLARED_REWARD})
    """Declared metrics by name; none: `reward`, a float. Beside others `reward` counts, too, as a float that is not
    waited for; feedback of any other name is refused."""
    max_wait_s: float = Field(60.0, gt=0)
    """A smaller batch is trained once its oldest member has waited this long; with shares, the oldest of two owners."""
    match_ttl_s: float = Field(900.0, gt=0)
    """Feedback whose interaction does not appear within this time expires."""
    idle_ttl_s: float = Field(1800.0, gt=0)
    """An episode without a request for this long is over."""
    episodes: Literal["named", "found"] = "named"
    """Turns credited as one episode: those that name theirs; or also a conversation that nobody named, found by its
    messages: each answer to a chat then waits for the end of its episode, as those of named ones do."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later rewards along the branches of an episode."""
    balance: Literal["episodes", "trajectories"] = "episodes"
    """Unit of equal weight in the policy loss: episodes, whose branches share the weight of one, or every trajectory:
    an episode with three branches then weighs as much as three."""
    invalid_reward: float | None = None
    """Reward of a completion whose tool calls cannot be parsed; null: the lowest bound of the declared metrics."""
    defences: Defences = "none"
    """`standard`: a key not written here has the value of [Defences](online-defences.md#defences), not its default."""
    max_share_per_key: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch that one key judged; an answer that nobody judged counts for the key that asked."""
    max_share_per_asker: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch that was answered to one key."""
    max_share_per_user: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch that are conversations of one user, whoever judged them."""
    raters: Literal["any", "same_key"] = "any"
    """Whose feedback counts: that of `any` key that may post it, or only of the key that the answer was served to."""
    new_sources: NewSourcesConfig | None = None
    """Weight of feedback from API keys that are not known yet; null: that of all others."""
    off_policy: OffPolicyConfig | None = None
    """Losses on material that may not be used on-policy; null: none."""
    posted: PostedConfig = PostedConfig()
    """Uses of posted interactions."""
    consent: Literal["opt_out", "opt_in"] = "opt_out"
    """Whose conversations are trained on: all but those of users who said no, or only those of users who said yes."""
    hold_s: float = Field(30.0, gt=0)
    """How long a request waits for weights or a free worker before the client is told to come back."""
    promotion: PromotionConfig | None = None
    """When a new version is served; null: as soon as it is trained."""
    quarantine: QuarantineConfig | None = None
    """When feedback is held back for somebody to look at; null: never."""
    forced_sampling: bool = False
    """Sample as the job's `sampling` says whatever clients ask for, so that answers can be trained on; they still
    choose length, stop strings, seed and the form of the answer."""
    strict_recording: bool = False
    """An answer that could not be recorded is refused with 503 instead of served with `x-recorded: false`."""
    truncated: Literal["judge", "mask", "penalise", "leave_out"] = "judge"
    """An answer that hit the length limit: earns what is said of it; so, but is masked: its reward counts in the
    baseline, its tokens in no loss; earns `invalid_reward`; or is never trained on (what it earned still counts for the
    turns before it)."""
    unfinished: Literal["judge", "mask"] = "judge"
    """An episode that nobody ended, which was idle or too old: trained like others, or masked, all its turns."""
    max_age_s: float = Field(86400.0, gt=0)
    """An episode is over this long after its first request, even if requests go on: later turns are `episode_over`."""
    redaction: RedactionConfig | None = None
    """Texts blanked in requests, answers and feedback before they are stored; null: none."""

    @field_validator("metrics")
    @classmethod
    def _something_is_waited_for(cls, metrics: dict[str, MetricConfig]) -> dict[str, MetricConfig]:
        return metrics or {REWARD: UNDECLARED_REWARD}

    @model_validator(mode="before")
    @classmethod
    def _with_defences(cls, data: Any) -> Any:
        return with_defences(data)

    def metric(self, name: str) -> MetricConfig | None:
        """How values of this name count; None: they do not. Undeclared, `reward` is a float."""
        return self.metrics.get(name, UNDECLARED_REWARD if name == REWARD else None)

    def of_level(self, level: Level) -> dict[str, MetricConfig]:
        """Metrics that add up to the reward of a turn, or of a whole episode, by name.

        Undeclared, `reward` is of both, for it judges what its feedback names; where it is missing, it adds nothing.
        """
        declared = {name: metric for name, metric in self.metrics.items() if metric.level == level}
        return declared if REWARD in self.metrics else {**declared, REWARD: UNDECLARED_REWARD}

    @property
    def is_defended(self) -> bool:
        """True if anything bounds what one sender of feedback, or one update, can do."""
        shares = (self.max_share_per_key, self.max_share_per_asker, self.max_share_per_user)
        sections = (self.new_sources, self.quarantine, self.promotion)
        return min(shares) < 1 or self.raters != "any" or any(section is not None for section in sections)

    @property
    def has_credit(self) -> bool:
        """True if feedback on one turn, or on the whole, concerns other turns of an episode."""
        return self.gamma > 0 or any(metric.level == "episode" for metric in self.metrics.values())

    @property
    def without_consent(self) -> str:
        """Why the conversations of a user are not trained on who does not allow it."""
        return "opted_out" if self.consent == "opt_out" else "no_consent"

    @property
    def canary(self) -> CanaryConfig | None:
        """How versions are tried on live traffic; None: they are not."""
        return None if self.promotion is None else self.promotion.canary
