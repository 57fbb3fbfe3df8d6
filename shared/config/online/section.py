"""Section `online`: declared metrics, admission of interactions, batches, and defences."""

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
    """Use of posted interactions (answers that a client sampled elsewhere and posted) in the policy loss, not only for
    imitation."""

    trusted_keys: list[str] = Field(default_factory=list, max_length=64)
    """Ids of the API keys whose posted tokens the policy loss may use; `*`: every key that may post feedback."""
    audit_share: float = Field(0.05, ge=0, le=1)
    """Share of the interactions posted with log-probs for which a rollout worker recomputes the log-probs."""
    max_logprob_gap: float = Field(0.1, gt=0)
    """Mean difference between posted and recomputed log-probs above which the job no longer trusts a key."""
    held_versions: int = Field(0, ge=0, le=16)
    """Number of previous versions whose weights each rollout worker keeps in host memory, to recompute log-probs of
    posted answers; each needs the memory of the published weights (the model, or its adapters)."""
    assume_on_policy: bool = False
    """Treat posted answers without log-probs as samples of the newest policy; only for agents that sample from it."""
    max_assumed_share: float = Field(0.25, gt=0, le=0.25)
    """Largest number of answers treated by `assume_on_policy` in a batch, as a fraction of `train.batch_size`."""
    assumed_weight: float = Field(0.5, gt=0, le=1)
    """Factor of the advantages of posted answers that `assume_on_policy` treats as samples of the newest policy."""


class NewSourcesConfig(StrictModel):
    """Limits on new sources of feedback. A source is an API key. It counts as new until enough of the answers that it
    judged were also judged by a trusted key (`reference_keys`)."""

    reference_keys: list[str] = Field(min_length=1, max_length=64)
    """Ids of the API keys that are trusted from the start, such as an automatic judge or auditors."""
    weight: float = Field(0.2, gt=0, le=1)
    """Factor of the advantages of answers that a new source judged."""
    items: int = Field(30, ge=10)
    """Number of feedback values after which a source no longer counts as new. Only values on answers that a reference
    key also judged are counted."""
    agreement: float = Field(0.4, gt=0, le=1)
    """Smallest concordance of a source with the reference keys; for boolean metrics, Cohen's kappa."""


Defences = Literal["standard", "none"]

STANDARD: Mapping[str, Any] = {
    "raters": "same_key",
    "max_share_per_key": 0.2,
    "max_share_per_user": 0.02,
    "quarantine": {},
    "promotion": {"max_mismatch": 0.05, "min_entropy": 0.02},
}
"""Values of the preset `standard`. A few per cent of poisoned preferences are enough to steer a model (Best-of-Venom,
arXiv 2404.05530), so the share of one user stays below that. The bounds of the promotion gate need no held-out data:
they refuse a collapsed policy, or one far from the policy that sampled its data."""


def with_defences(data: Any) -> Any:
    """Return the section `online` with unset keys filled in from the preset `standard`, if the section selects it."""
    if not isinstance(data, Mapping) or data.get("defences") != "standard":
        return data
    written = {name: _under(STANDARD[name], value) for name, value in data.items() if name in STANDARD}
    return {**STANDARD, **data, **written}


def _under(preset: Any, written: Any) -> Any:
    """Return the user's section ``written``, with its unset keys filled in from ``preset``."""
    return {**preset, **written} if isinstance(preset, Mapping) and isinstance(written, Mapping) else written


Level = Literal["interaction", "episode"]
REWARD = "reward"
"""Metric that counts in every job, declared or not."""

RESERVED_METRICS = frozenset({"comment", "demonstration"})
"""Metrics whose values are texts, which are never rewards by themselves."""


class MetricConfig(StrictModel):
    """Declared metric of feedback."""

    type: Literal["boolean", "float"]
    """Type of the metric's values."""
    level: Level = "interaction"
    """Target of the metric. A metric of an episode rewards the last interaction of each branch of the episode."""
    when_true: float = 1.0
    """Reward of `true` (boolean metrics)."""
    when_false: float = -1.0
    """Reward of `false` (boolean metrics)."""
    weight: float = 1.0
    """Factor in the sum over metrics."""
    clip: tuple[float, float] = (-1.0, 1.0)
    """Bounds of the weighted value. A float is rejected if its weighted value exceeds ten times the larger bound."""
    default_after_s: float | None = Field(None, gt=0)
    """Time after the interaction (seconds) at which a missing metric gets `default_value`; null: wait for it without
    limit."""
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
    """Conversion of live interactions to training data."""

    metrics: dict[str, MetricConfig] = Field(default_factory=lambda: {REWARD: UNDECLARED_REWARD})
    """Declared metrics by name; none: `reward`, a float. If other metrics are declared, feedback named `reward` counts
    too, as a float, but no answer waits for it. Feedback with any other name is rejected."""
    max_wait_s: float = Field(60.0, gt=0)
    """Longest wait of a group for a full batch (seconds). After that the coordinator forms a batch smaller than
    `train.batch_size`. If a `max_share_*` is below 1, the coordinator forms a smaller batch only once groups of two
    owners (keys or users) have waited this long."""
    match_ttl_s: float = Field(900.0, gt=0)
    """Time (seconds) after which feedback expires if its interaction has not appeared."""
    idle_ttl_s: float = Field(1800.0, gt=0)
    """Time without a request (seconds) after which an episode ends."""
    episodes: Literal["named", "found"] = "named"
    """Turns that share rewards as one episode. `named`: turns whose requests name the same episode; `found`: also
    conversations of requests that name no episode, recognised by their messages. With `found`, every answer to a
    chat is trained on only after the end of its episode."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later rewards along the branches of an episode; 0: no credit from later turns."""
    balance: Literal["episodes", "trajectories"] = "episodes"
    """Unit of equal weight in the policy loss. `episodes`: all branches of an episode together weigh as much as one
    trajectory; `trajectories`: each branch weighs as much, so an episode with three branches has three times the
    weight."""
    invalid_reward: float | None = None
    """Reward of a completion whose tool calls cannot be parsed; null: the lowest bound of the declared metrics."""
    defences: Defences = "none"
    """Preset of defences. `standard`: keys that are not set have the values of
    [Defences](online-defences.md#defences) instead of their defaults."""
    max_share_per_key: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch that one key judged; an answer without a judge counts for the key that requested it."""
    max_share_per_asker: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch that was requested by one key."""
    max_share_per_user: float = Field(1.0, gt=0, le=1)
    """Largest share of a batch from conversations of one user, whichever keys judged them."""
    raters: Literal["any", "same_key"] = "any"
    """Keys whose feedback on an answer counts: `any` key that may post feedback, or only the key that requested the
    answer."""
    new_sources: NewSourcesConfig | None = None
    """Reduced weight of feedback from new API keys; null: all keys have the same weight."""
    off_policy: OffPolicyConfig | None = None
    """Losses for data that the policy loss cannot use; null: none."""
    posted: PostedConfig = PostedConfig()
    """Uses of posted interactions beside imitation."""
    consent: Literal["opt_out", "opt_in"] = "opt_out"
    """Users whose conversations are trained on: all who did not opt out, or only those who opted in."""
    hold_s: float = Field(30.0, gt=0)
    """Longest wait of a request for weights or a free worker (seconds). After that the reply asks the client to retry
    later."""
    promotion: PromotionConfig | None = None
    """Promotion gate of new versions; null: each version is served as soon as it is trained."""
    quarantine: QuarantineConfig | None = None
    """Quarantine of unusual feedback until a user reviews it; null: no quarantine."""
    forced_sampling: bool = False
    """Use the job's `sampling` instead of the sampling parameters of clients, so that all answers can be trained on.
    Clients still choose length, stop strings, seed and the prescribed form of the answer."""
    strict_recording: bool = False
    """Refuse a request with 503 if its answer could not be recorded, instead of serving the answer with `x-recorded:
    false`."""
    truncated: Literal["judge", "mask", "penalise", "leave_out"] = "judge"
    """Handling of answers that hit the length limit. `judge`: the answer is rewarded by its feedback; `mask`: its
    reward counts in the baseline, but its tokens are in no loss; `penalise`: it is rewarded with `invalid_reward`;
    `leave_out`: it is never trained on, but its feedback still counts for earlier turns."""
    unfinished: Literal["judge", "mask"] = "judge"
    """Handling of episodes that no client ended and that became idle or too old: trained like others, or all turns
    masked."""
    max_age_s: float = Field(86400.0, gt=0)
    """Time after its first request (seconds) at which an episode ends; later turns are marked `episode_over`."""
    redaction: RedactionConfig | None = None
    """Redaction of requests, answers and feedback before they are stored; null: none."""

    @field_validator("metrics")
    @classmethod
    def _something_is_waited_for(cls, metrics: dict[str, MetricConfig]) -> dict[str, MetricConfig]:
        return metrics or {REWARD: UNDECLARED_REWARD}

    @model_validator(mode="before")
    @classmethod
    def _with_defences(cls, data: Any) -> Any:
        return with_defences(data)

    def metric(self, name: str) -> MetricConfig | None:
        """Return the definition of the metric ``name``, or None if the job declares no such metric. `reward` is a float
        metric even if undeclared."""
        return self.metrics.get(name, UNDECLARED_REWARD if name == REWARD else None)

    def of_level(self, level: Level) -> dict[str, MetricConfig]:
        """Return the metrics, by name, that add up to the reward of a turn or of a whole episode.

        An undeclared `reward` belongs to both levels, because its feedback may name a turn or an episode. Without
        such feedback it adds nothing to the reward.
        """
        declared = {name: metric for name, metric in self.metrics.items() if metric.level == level}
        return declared if REWARD in self.metrics else {**declared, REWARD: UNDECLARED_REWARD}

    @property
    def is_defended(self) -> bool:
        """True if any setting limits the influence of a single feedback sender or of a single policy update."""
        shares = (self.max_share_per_key, self.max_share_per_asker, self.max_share_per_user)
        sections = (self.new_sources, self.quarantine, self.promotion)
        return min(shares) < 1 or self.raters != "any" or any(section is not None for section in sections)

    @property
    def has_credit(self) -> bool:
        """True if the reward of a turn may depend on more than the feedback on this turn: on later turns (``gamma``
        above 0), or on a metric of the whole episode."""
        return self.gamma > 0 or any(metric.level == "episode" for metric in self.metrics.values())

    @property
    def without_consent(self) -> str:
        """Reason code recorded for conversations that are not trained on because the user did not consent."""
        return "opted_out" if self.consent == "opt_out" else "no_consent"

    @property
    def canary(self) -> CanaryConfig | None:
        """Canary trial of new versions; None: no trial."""
        return None if self.promotion is None else self.promotion.canary
