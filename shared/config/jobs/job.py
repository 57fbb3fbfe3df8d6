"""Job file of a language model: all settings of a run, typed, frozen, validated before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from penstock.shared.config.algorithm import AlgorithmConfig, DistillationConfig, GRPOConfig, ReinforcePPConfig
from penstock.shared.config.backend import LocalConfig, MegatronConfig
from penstock.shared.config.base import StrictModel
from penstock.shared.config.data import DataConfig, Source, TasksSource, source_names
from penstock.shared.config.environment import (
    AnyEnvironment,
    check_completions,
    check_environment,
    completion_tokens,
)
from penstock.shared.config.evaluation import EvaluationConfig
from penstock.shared.config.jobs.training_job import MAX_GROUP_BYTES, RunConfig, TrainingJob, known_kind
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.online.off_policy import OffPolicyConfig
from penstock.shared.config.optimizer import OptimizerConfig, Schedule
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rollout import EmbeddedConfig, RolloutConfig, check_engine
from penstock.shared.config.sampling import SamplingConfig

__all__ = [
    "ROW_BYTES",
    "JobConfig",
    "OptimizerConfig",
    "SamplingConfig",
    "TrainConfig",
    "WarmStartConfig",
    "group_bytes",
]

BYTES_PER_TOKEN = 24
"""Upper bound of the bytes per token in a stored group: id, log-prob and mask (9), text, spans, frame padding."""
GROUP_OVERHEAD_BYTES = 4096
"""Upper bound of a group's headers, answer, reward parts and a data row of ROW_BYTES (bytes)."""
ROW_BYTES = 1024
"""Bytes of a data row that ``group_bytes`` includes; for a larger row, the caller must add the excess."""


def group_bytes(prompt_tokens: int, completions: int, new_tokens: int, *, table_bytes: int = 0, turns: int = 1) -> int:
    """Return an upper bound of the size of one stored group, in bytes.

    Args:
        new_tokens: tokens of each completion, over all its ``turns``.
        table_bytes: bytes per token in addition to BYTES_PER_TOKEN.
    """
    tokens = prompt_tokens + completions * new_tokens
    return GROUP_OVERHEAD_BYTES + 64 * completions * turns + (BYTES_PER_TOKEN + table_bytes) * tokens


class WarmStartConfig(StrictModel):
    """Supervised training on reference answers before version 0 is published."""

    steps: int = Field(0, ge=0)
    """Optimizer steps; 0: no warm start."""
    batch_size: int = Field(64, ge=1)
    """Rows per step."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    schedule: Schedule = "constant"
    """Shape of the learning-rate decay over the steps."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
    data: list[Source] = Field(default_factory=list)
    """Sources of demonstrations; empty: the rows of `data.train`. Separate sources make a warm start possible if the
    training prompts have only a checker and no answers."""
    demonstration: list[str] = Field(default_factory=list)
    """Demonstration built from a row, as format strings over the row's fields: alternately text of the policy and
    answers of its environment, beginning and ending with the policy. Only the policy's parts are trained on. Empty: the
    reference answer."""

    @field_validator("demonstration")
    @classmethod
    def _ends_with_the_policy(cls, value: list[str]) -> list[str]:
        if value and len(value) % 2 == 0:
            raise ValueError("policy and environment take turns, and the policy has the last word: give an odd number")
        return value


class TrainConfig(RunConfig):
    """Batch size, lag bound and length of a run over a data set."""

    epochs: int = Field(1, ge=1, le=64)
    """Passes over a batch."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass; must divide the number of groups in a batch."""
    reshuffle: bool = False
    """Shuffle the groups of each pass after the first into different minibatches. The permutation depends only on
    the job's seed and the numbers of the update and the pass, so that a replay repeats it. Pairs and
    demonstrations of `off_policy` keep their order."""
    max_tokens_per_microbatch: int = Field(16384, ge=16)
    """Largest number of packed tokens per forward/backward pass; affects only memory and speed."""
    data_epochs: int | None = Field(None, ge=1)
    """Stop after this many passes over the data; null: no limit. At least one of `max_updates` and `data_epochs` is
    needed."""

    @model_validator(mode="after")
    def _has_an_end(self) -> TrainConfig:
        if self.max_updates is None and self.data_epochs is None:
            raise ValueError("give max_updates or data_epochs: the run needs an end")
        return self

    @model_validator(mode="after")
    def _has_something_to_shuffle(self) -> TrainConfig:
        if self.reshuffle and (self.epochs == 1 or self.minibatches == 1):
            raise ValueError("reshuffle: needs epochs > 1 and minibatches > 1: nothing else is cut more than once")
        return self


class JobConfig(TrainingJob):
    """Reinforcement learning of a causal language model on a data set of prompts."""

    kind: Annotated[Literal["rl"], BeforeValidator(known_kind)] = "rl"
    """Kind of job; `rl` trains on a data set of prompts."""
    model: ModelConfig
    """Policy to train."""
    data: DataConfig
    """Training and held-out data."""
    reward: RewardConfig
    """Scoring of completions."""
    algorithm: AlgorithmConfig = Field(default_factory=GRPOConfig)
    """Algorithm, which defines advantages and loss."""
    environment: AnyEnvironment | None = None
    """Multi-turn episodes, with tools or in an environment of `verifiers`; null: one completion per prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling settings of training completions."""
    rollout: RolloutConfig = EmbeddedConfig()
    """Rollout engine."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and its schedule."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised training before version 0."""
    train: TrainConfig
    """Batch size, lag bound and length of the run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""

    @model_validator(mode="after")
    def _optimizers_fit_the_backend(self) -> JobConfig:
        critic = self.algorithm.critic
        types = {self.optimizer.type, critic.optimizer.type if critic is not None else "adamw"}
        if "adamw_8bit" in types and self.backend.type != "local":
            raise ValueError(
                f"optimizer.type 'adamw_8bit' needs backend 'local'; backend '{self.backend.type}' shards the moments "
                "instead: use 'adamw'"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_do_it(self) -> JobConfig:
        check_engine(self.rollout, self.model, self._engine_wants(), is_updated=True)
        if self.rollout.on_update == "restart" and self.environment is not None:
            raise ValueError(
                "rollout.on_update 'restart': an episode may have changed its environment already; use drain or keep"
            )
        return self

    def _engine_wants(self) -> Iterator[tuple[str, str, bool]]:
        """Yield ``(key, capability, wanted)`` for each job key that may need a capability of the engine. ``capability``
        is a field of ``Caps``; ``wanted`` is True if this job needs the capability."""
        yield from ()

    @model_validator(mode="after")
    def _batch_algebra(self) -> JobConfig:
        if self.groups_per_batch % self.train.minibatches:
            raise ValueError(
                f"the {self.groups_per_batch} groups of a batch are not divisible by train.minibatches "
                f"{self.train.minibatches}: a group never straddles two optimizer steps"
            )
        return self

    @model_validator(mode="after")
    def _values_are_tracked_online(self) -> JobConfig:
        if self.kind == "rl" and isinstance(self.algorithm, ReinforcePPConfig) and self.algorithm.baseline is not None:
            raise ValueError(
                "algorithm.baseline: values are tracked in jobs of kind online_rl; a job with prompts of its own has "
                "'reinforce_pp_baseline', which compares several answers to each"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_have_prompts(self) -> JobConfig:
        if self.evaluation.every and not self.data.eval:
            raise ValueError("evaluation.every: there is nothing to evaluate on: give data.eval, or leave it out")
        return self

    @model_validator(mode="after")
    def _evaluation_metrics_exist(self) -> JobConfig:
        followed = {"early_stop.metric": self.early_stop, "checkpoint.keep_best.metric": self.checkpoint.keep_best}
        known = self.evaluation.metrics_of(source_names(self.data.eval))
        for key, rule in followed.items():
            if rule is not None and rule.metric.startswith("eval/") and rule.metric not in known:
                names = ", ".join(known) or "nothing, for there is no evaluation or no data.eval"
                raise ValueError(f"{key}: no evaluation of this job measures '{rule.metric}'; they measure {names}")
        return self

    @model_validator(mode="after")
    def _backend_can_cut_the_model(self) -> JobConfig:
        if not isinstance(self.backend, LocalConfig):
            self.backend.check(self.model)
        return self

    @model_validator(mode="after")
    def _backend_holds_the_teacher(self) -> JobConfig:
        if isinstance(self.algorithm, DistillationConfig) and isinstance(self.backend, MegatronConfig):
            raise ValueError("algorithm distillation: backend 'megatron' holds no teacher: use 'local' or 'fsdp'")
        return self

    @model_validator(mode="after")
    def _training_samples_untruncated(self) -> JobConfig:
        s = self.sampling
        if s.temperature == 0 or s.top_p != 1 or s.top_k != 0:
            raise ValueError(
                "sampling: training needs temperature > 0, top_p = 1 and top_k = 0 (log-probs of a truncated "
                "distribution bias the ratio); put other values under evaluation.sampling"
            )
        if s.min_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens: training needs 0, found {s.min_new_tokens}: stop tokens would be masked "
                "while sampling, and log-probs of the whole softmax bias the ratio; for completions of one length set "
                "sampling.ignore_eos, or put it under evaluation.sampling"
            )
        return self

    @model_validator(mode="after")
    def _environment_fits(self) -> JobConfig:
        check_environment(self.environment, self.reward, [*self.data.train, *self.data.eval])
        shown = self.warm_start.data or self.data.train
        if self.warm_start.steps and any(isinstance(source, TasksSource) for source in shown):
            raise ValueError("warm_start: tasks of an environment have no answers to show: give warm_start.data")
        return self

    @model_validator(mode="after")
    def _completions_fit_the_model(self) -> JobConfig:
        check_completions(self.model, "sampling", self.sampling, self.environment)
        if self.evaluation.sampling is not None:
            check_completions(self.model, "evaluation.sampling", self.evaluation.sampling, self.environment)
        return self

    @model_validator(mode="after")
    def _budget_holds_the_pipeline(self) -> JobConfig:
        if self.max_group_bytes > MAX_GROUP_BYTES:
            raise ValueError(
                f"a group of {self.algorithm.group_size} completions of up to {self.max_completion_tokens} tokens "
                f"may take {self.max_group_bytes} bytes, more than a group may have ({MAX_GROUP_BYTES}): "
                "lower algorithm.group_size or sampling.max_new_tokens"
            )
        need = (self.train.max_lag + 2) * self.groups_per_batch * self.max_group_bytes
        if need > self.limits.byte_budget // 2:
            raise ValueError(
                f"limits.byte_budget: {self.train.max_lag + 2} batches of up to {self.groups_per_batch} x "
                f"{self.max_group_bytes} bytes need {need} bytes and must fit in half of the budget "
                f"({self.limits.byte_budget}): raise it to at least {2 * need}, or use smaller batches"
            )
        return self

    @property
    def warm_start_data(self) -> DataConfig:
        """Section `data` with the demonstrations that the warm start reads."""
        data = self.data_config
        return data.model_copy(update={"train": self.warm_start.data}) if self.warm_start.data else data

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """Sampling settings of held-out completions."""
        return self.evaluation.sampling or self.sampling

    @property
    def off_policy(self) -> OffPolicyConfig | None:
        """Losses in addition to the policy loss; None: only the policy loss."""
        return None

    @property
    def assumed_weight(self) -> float:
        """Factor on the advantages of trajectories whose sampling policy is unknown; they are trained as if the newest
        policy had sampled them."""
        return 1.0

    @property
    def needs_reference(self) -> bool:
        """True if the trainer keeps a frozen reference policy."""
        return self.algorithm.needs_reference

    @property
    def services(self) -> tuple[str, ...]:
        """Worker services that the job needs to make progress."""
        wanted = {"reward": bool(self.reward.scorers), "env": self.environment is not None}
        return ("trainer", "rollout", *(name for name, needed in wanted.items() if needed))

    @property
    def data_epochs(self) -> int | None:
        """Passes over the data after which the run ends; None: the data set is endless or other keys end the run."""
        return self.train.data_epochs

    @property
    def train_sources(self) -> list[str]:
        """Names of the sources of training prompts."""
        return source_names(self.data.train)

    @property
    def data_config(self) -> DataConfig:
        """Data section, with the tool schemas that the environment adds to prompts."""
        return self.data if self.environment is None else self.data.with_tools(self.environment.schemas)

    @property
    def max_completion_tokens(self) -> int:
        """Upper bound of the tokens after a training prompt, observations included."""
        return completion_tokens(self.sampling, self.environment)

    @property
    def max_group_bytes(self) -> int:
        """Upper bound of the size of one stored group (bytes)."""
        return group_bytes(
            self.data.prompt.max_tokens, self.completions_per_group, self.max_completion_tokens,
            table_bytes=self.model.replay_bytes_per_token, turns=self.environment.max_turns if self.environment else 1,
        )  # fmt: skip
