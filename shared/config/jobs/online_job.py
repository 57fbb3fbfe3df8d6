"""Job file of an online job: a policy that serves live agents and learns from feedback on its answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from penstock.shared.config.algorithm import AlgorithmConfig, PPOConfig, ReinforcePPConfig
from penstock.shared.config.data import DataConfig, Sources
from penstock.shared.config.jobs.job import JobConfig, TrainConfig, group_bytes
from penstock.shared.config.online.off_policy import OffPolicyConfig
from penstock.shared.config.online.section import OnlineConfig
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rewards.scorers import ScorerConfig

__all__ = ["OnlineData", "OnlineJob", "OnlineReward", "OnlineTrain"]

GROUPLESS = ("reinforce_pp", "ppo")
"""Algorithms that can learn from one answer per prompt."""
_ALGORITHMS = [kind.model_fields["type"].default for kind in get_args(get_args(AlgorithmConfig)[0])]
MAX_LAG = 8
"""Largest lag bound that a job file may set; with more lag, recorded log-probs describe the trained policy too
poorly."""


class OnlineData(DataConfig):
    """Held-out data of an online job; agents send the training prompts."""

    train: Sources = Field(default_factory=list, max_length=0)
    """Always empty: live agents send the prompts."""


class OnlineReward(RewardConfig):
    """Scoring of held-out answers; training rewards come from feedback."""

    scorers: list[ScorerConfig] = Field(default_factory=list, max_length=8)
    """Scorers of answers to held-out prompts; empty: no held-out evaluation."""


class OnlineTrain(TrainConfig):
    """Batch size and lag bound; without `max_updates` the run continues until a user ends it."""

    batch_size: int = Field(64, ge=2)
    """Trajectories per full batch."""
    max_lag: int = Field(1, ge=0, le=MAX_LAG)
    """Bound on (trainer version at the start of an update) - (oldest version in a trajectory)."""

    @model_validator(mode="after")
    def _has_an_end(self) -> OnlineTrain:
        if self.data_epochs is not None:
            raise ValueError("data_epochs: an online job has no training data; leave it out, or give max_updates")
        return self

    @model_validator(mode="after")
    def _trains_what_comes(self) -> OnlineTrain:
        if self.staleness == "in_order":
            raise ValueError("staleness: 'in_order' would wait for one agent's feedback; use wait or drop")
        return self


def _without_groups(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    data = {"type": GROUPLESS[0], **data}
    if data["type"] in _ALGORITHMS and data["type"] not in GROUPLESS:
        raise ValueError(
            f"type '{data['type']}' needs several answers to the same prompt, and a live agent asks once: "
            f"use {' or '.join(GROUPLESS)}"
        )
    if data.get("group_size", 1) != 1:
        raise ValueError("group_size: a live agent asks once, so a group has one answer; leave it out")
    return data


OnlineAlgorithm = Annotated[
    ReinforcePPConfig | PPOConfig, Field(discriminator="type"), BeforeValidator(_without_groups)
]


class OnlineJob(JobConfig):
    """Policy served to live agents under the job's name and trained on their feedback."""

    kind: Literal["online_rl"]  # type: ignore[assignment]  # kinds exclude each other, their jobs train alike
    """Kind of job; `online_rl` serves agents and trains on their feedback."""
    data: OnlineData = OnlineData()
    """Held-out prompts, and the longest prompt used for training (`prompt.max_tokens`)."""
    reward: OnlineReward = OnlineReward()
    """Scoring of answers to held-out prompts."""
    algorithm: OnlineAlgorithm = Field(default_factory=ReinforcePPConfig)
    """Algorithm, which defines advantages and loss; it needs no groups of completions."""
    train: OnlineTrain = OnlineTrain()
    """Batch size and lag bound."""
    online: OnlineConfig = OnlineConfig()
    """Conversion of live interactions to training data."""

    @model_validator(mode="after")
    def _live_answers_go_on(self) -> OnlineJob:
        if self.rollout.on_update != "keep":
            raise ValueError("rollout.on_update: live answers go on at an update; leave it out")
        return self

    @model_validator(mode="after")
    def _what_is_measured_is_scored(self) -> OnlineJob:
        if self.environment is not None:
            raise ValueError("environment: agents bring their own tools; leave it out")
        if self.data.eval and not self.reward.scorers:
            raise ValueError("reward.scorers: data.eval is there to be measured, and nothing scores it")
        if self.warm_start.steps and not self.warm_start.data:
            raise ValueError("warm_start.data: an online job has no training data; name the demonstrations")
        return self

    @model_validator(mode="after")
    def _shares_fit_the_batch(self) -> OnlineJob:
        for key in ("max_share_per_key", "max_share_per_asker", "max_share_per_user"):
            share = getattr(self.online, key)
            if share * self.train.batch_size < 1:
                raise ValueError(
                    f"online.{key}: {share:g} of a batch of {self.train.batch_size} is less than one trajectory; "
                    f"raise it, or train.batch_size to {math.ceil(1 / share)}"
                )
        return self

    def _engine_wants(self) -> Iterator[tuple[str, str, bool]]:
        yield "online.posted.held_versions", "held", self.online.posted.held_versions > 0
        yield "online.promotion", "candidates", self.online.promotion is not None

    @property
    def off_policy(self) -> OffPolicyConfig | None:
        """Losses in addition to the policy loss; None: only the policy loss."""
        return self.online.off_policy

    @property
    def assumed_weight(self) -> float:
        """Factor on the advantages of posted answers whose sampling policy is unknown; they are trained as if the
        newest policy had sampled them."""
        return self.online.posted.assumed_weight

    @property
    def needs_reference(self) -> bool:
        """True if the trainer keeps a frozen reference policy, for a KL penalty or the preference loss."""
        off_policy = self.online.off_policy
        return super().needs_reference or (off_policy is not None and off_policy.preference is not None)

    @property
    def max_group_bytes(self) -> int:
        """Upper bound of the size of one stored group (bytes). A group has one completion, a preference pair two."""
        off_policy = self.online.off_policy
        pairs = off_policy is not None and off_policy.preference is not None
        return group_bytes(
            self.data.prompt.max_tokens, 2 if pairs else 1, self.sampling.max_new_tokens,
            table_bytes=self.model.replay_bytes_per_token,
        )  # fmt: skip

    @model_validator(mode="after")
    def _promotion_can_be_decided(self) -> OnlineJob:
        gate, evaluation = self.online.promotion, self.evaluation
        if gate is None:
            return self
        if gate.max_kl is not None and not self.algorithm.needs_reference:
            raise ValueError("online.promotion.max_kl: the KL to which reference policy? Set algorithm.kl")
        every = 1
        if gate.max_drop is not None:
            if not self.data.eval or gate.metric not in evaluation.metrics:
                raise ValueError(
                    f"online.promotion.max_drop: no evaluation of this job measures '{gate.metric}'; give data.eval "
                    f"and reward.scorers, or choose among {evaluation.metrics}"
                )
            if not (evaluation.every and evaluation.at_start):
                raise ValueError(
                    "online.promotion.max_drop: versions are compared, so set evaluation.every, and at_start: true"
                )
            every = evaluation.every
        if gate.patience * every > self.train.max_lag + 1:
            raise ValueError(
                f"online.promotion.patience: {gate.patience} refused versions, one measured every {every} updates, "
                f"need train.max_lag >= {gate.patience * every - 1}: or what is served is too old to be trained on"
            )
        return self
