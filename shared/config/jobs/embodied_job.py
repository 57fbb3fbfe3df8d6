"""The job file of a policy that acts in a simulator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.config.backend import FSDPConfig, LocalConfig
from penstock.shared.config.embodied import (
    IMAGE,
    EmbodiedAlgorithm,
    EpisodeEvaluationConfig,
    EpisodePPOConfig,
    EpisodeWarmStartConfig,
    PolicyConfig,
    SimulatorBase,
    SimulatorConfig,
    SoftActorCriticConfig,
)
from penstock.shared.config.jobs.training_job import MAX_GROUP_BYTES, RunConfig, TrainingJob

__all__ = ["EmbodiedJob", "EpisodeRunConfig"]

GROUP_OVERHEAD_BYTES = 4096
"""Upper bound of the header, metadata and frame padding of a group (bytes)."""
EPISODE_OVERHEAD_BYTES = 512
"""Upper bound of the overhead of an episode, without its decisions and its final observation (bytes)."""


class EpisodeRunConfig(RunConfig):
    """Batch size, lag bound and length of a run."""

    batch_size: int = Field(16, ge=1)
    """Episodes per policy update; a multiple of the algorithm's group_size."""
    max_updates: int = Field(ge=1)
    """Stop after this many policy updates."""


class EmbodiedJob(TrainingJob):
    """Policy trained to act in a simulator. A draw is `group_size` whole episodes that begin from one reset id."""

    kind: Literal["embodied"]
    """Kind of job; `embodied` trains on episodes of a simulator."""
    environment: SimulatorConfig
    """Simulator in which the policy acts."""
    policy: PolicyConfig = PolicyConfig()
    """Network of the policy."""
    algorithm: EmbodiedAlgorithm = Field(default_factory=EpisodePPOConfig)
    """Algorithm, which defines advantages and loss."""
    backend: LocalConfig | FSDPConfig = Field(LocalConfig(), discriminator="type")
    """Training backend: with `fsdp` every rank holds the whole policy and computes its part of each minibatch."""
    train: EpisodeRunConfig
    """Batch size, lag bound and length of the run."""
    evaluation: EpisodeEvaluationConfig = EpisodeEvaluationConfig()
    """Held-out evaluation."""
    warm_start: EpisodeWarmStartConfig | None = None
    """Behaviour cloning of demonstrations before the first version; null: random initial weights."""

    @model_validator(mode="after")
    def _policy_fits_the_algorithm(self) -> EmbodiedJob:
        off_policy = isinstance(self.algorithm, SoftActorCriticConfig)
        if off_policy and self.policy.type != "squashed":
            raise ValueError("policy.type: algorithm 'sac' trains a 'squashed' policy")
        if not off_policy and self.policy.type == "squashed":
            raise ValueError(f"policy.type: 'squashed' is for algorithm 'sac', found '{self.algorithm.type}'")
        return self

    @model_validator(mode="after")
    def _pictures_are_read(self) -> EmbodiedJob:
        if self.environment.image is not None and IMAGE not in self.policy.observations:
            raise ValueError(f"environment.image: the policy reads no '{IMAGE}'; name it in policy.observations")
        if self.environment.image is not None and isinstance(self.algorithm, SoftActorCriticConfig):
            raise ValueError("environment.image: the replay buffer of 'sac' holds vectors; take 'ppo' or 'grpo'")
        return self

    @model_validator(mode="after")
    def _warm_start_is_kept(self) -> EmbodiedJob:
        if self.warm_start is not None and isinstance(self.algorithm, SoftActorCriticConfig):
            raise ValueError(
                "warm_start: 'sac' would undo it, for its critics begin without knowledge; take 'ppo' or 'grpo'"
            )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> EmbodiedJob:
        if not isinstance(self.algorithm, SoftActorCriticConfig):
            return self
        most = self.train.max_updates * self.train.batch_size * self.max_decisions
        if most < self.algorithm.warmup_transitions:
            raise ValueError(
                f"algorithm.warmup_transitions {self.algorithm.warmup_transitions}: the run has at most {most} "
                "transitions, so nothing would be trained; lower it, or raise train.max_updates"
            )
        return self

    @model_validator(mode="after")
    def _held_out_ids_stay_held_out(self) -> EmbodiedJob:
        sim, held = self.environment, self.evaluation
        if not held.episodes or held.environment is not None:  # ids of another simulator
            return self
        count = sim.num_reset_ids
        if count is None:
            if sim.first_reset_id >= held.first_reset_id:
                raise ValueError(
                    f"evaluation.first_reset_id {held.first_reset_id}: training draws every id from "
                    f"{sim.first_reset_id} on; set environment.num_reset_ids, or hold out higher ids"
                )
            return self
        stop, held_stop = sim.first_reset_id + count, held.first_reset_id + held.episodes
        if sim.first_reset_id < held_stop and held.first_reset_id < stop:
            raise ValueError(
                f"evaluation.first_reset_id: ids {held.first_reset_id} to {held_stop - 1} are held out and ids "
                f"{sim.first_reset_id} to {stop - 1} are trained on: they overlap"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_metrics_exist(self) -> EmbodiedJob:
        followed = {"early_stop.metric": self.early_stop, "checkpoint.keep_best.metric": self.checkpoint.keep_best}
        known = self.evaluation.metrics if self.evaluation.episodes else []
        for key, rule in followed.items():
            if rule is not None and rule.metric.startswith("eval/") and rule.metric not in known:
                names = ", ".join(known) or "nothing, for evaluation.episodes is 0"
                raise ValueError(f"{key}: no evaluation of this job measures '{rule.metric}'; they measure {names}")
        return self

    @model_validator(mode="after")
    def _budget_holds_the_pipeline(self) -> EmbodiedJob:
        size, lag = self.max_group_bytes, self.train.max_lag
        if size > MAX_GROUP_BYTES:
            raise ValueError(
                f"a group of {self.algorithm.group_size} episodes of up to {self.environment.horizon} steps may take "
                f"{size} bytes, more than a group may have ({MAX_GROUP_BYTES}): lower algorithm.group_size, "
                "environment.horizon or environment.bytes_per_step"
            )
        need = 2 * (lag + 2) * self.groups_per_batch * size
        if need > self.limits.byte_budget:
            raise ValueError(
                f"limits.byte_budget: {lag + 2} batches of up to {self.groups_per_batch} x {size} bytes must fit in "
                f"half of the budget ({self.limits.byte_budget}): raise it to at least {need}, or use smaller batches"
            )
        return self

    @property
    def services(self) -> tuple[str, ...]:
        """Worker services that the job needs to make progress."""
        return "trainer", "rollout", "env"

    @property
    def held_out_simulator(self) -> SimulatorBase:
        """The simulator that plays held-out episodes."""
        return self.evaluation.environment or self.environment

    @property
    def max_decisions(self) -> int:
        """Largest number of decisions per episode."""
        return -(-self.environment.horizon // self.environment.action_chunk)

    @property
    def max_group_bytes(self) -> int:
        """Upper bound of the size of one stored group (bytes)."""
        episode = EPISODE_OVERHEAD_BYTES + (self.max_decisions + 1) * self.environment.bytes_per_step
        return GROUP_OVERHEAD_BYTES + self.completions_per_group * episode
