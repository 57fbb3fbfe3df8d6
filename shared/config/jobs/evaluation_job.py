"""The job file of an evaluation: a fixed policy on held-out prompts, without a trainer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.data import DataConfig, PromptConfig, Sources
from penstock.shared.config.environment import (
    AnyEnvironment,
    check_completions,
    check_environment,
    completion_tokens,
)
from penstock.shared.config.evaluation import MeasureConfig
from penstock.shared.config.jobs.job import group_bytes
from penstock.shared.config.jobs.training_job import MAX_GROUP_BYTES, LimitsConfig, PlacementConfig
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rollout import EmbeddedConfig, RolloutConfig, check_engine
from penstock.shared.config.sampling import SamplingConfig

__all__ = ["EvaluationData", "EvaluationJob"]


class EvaluationData(StrictModel):
    """Held-out data."""

    eval: Sources = Field(min_length=1)
    """Sources of held-out prompts, used one after another."""
    prompt: PromptConfig = PromptConfig()
    """Conversion of rows to prompts."""

    @model_validator(mode="before")
    @classmethod
    def _one_source_is_a_list(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("eval"), dict):
            data = {**data, "eval": [data["eval"]]}
        return data


class EvaluationJob(StrictModel):
    """Evaluation of one policy: a model directory, or a checkpoint of another job (`model.path: job:NAME@final`)."""

    kind: Literal["evaluation"]
    """Kind of job; `evaluation` samples and scores, without training."""
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Short name for display."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of every completion. With the seed of a training job, the completions equal those of that job's
    evaluations."""
    model: ModelConfig
    """Policy to evaluate."""
    data: EvaluationData
    """Held-out prompts."""
    reward: RewardConfig
    """Scoring of completions."""
    environment: AnyEnvironment | None = None
    """Multi-turn episodes, with tools or in an environment of `verifiers`; null: one completion per prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling settings; for greedy completions only the lengths and stop conditions are used."""
    rollout: RolloutConfig = EmbeddedConfig()
    """Rollout engine."""
    evaluation: MeasureConfig = MeasureConfig()
    """Metrics to measure."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of the job: bytes in the stream EXPERIENCE, and wall time."""
    placement: PlacementConfig = PlacementConfig()
    """Threads and devices of the services."""
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    """Labels that the user chooses freely."""

    @model_validator(mode="after")
    def _measures_something(self) -> EvaluationJob:
        if not self.evaluation.completions:
            raise ValueError("evaluation: greedy is false and samples is 0, so there is nothing to measure")
        return self

    @model_validator(mode="after")
    def _completions_fit_the_model(self) -> EvaluationJob:
        check_engine(self.rollout, self.model, iter(()), is_updated=False)
        check_completions(self.model, "sampling", self.sampling, self.environment)
        check_environment(self.environment, self.reward, self.data.eval)
        return self

    @model_validator(mode="after")
    def _budget_holds_all(self) -> EvaluationJob:
        if self.max_group_bytes > MAX_GROUP_BYTES:
            raise ValueError(
                f"a prompt's {self.completions_per_group} completions of up to {self.max_completion_tokens} tokens "
                f"may take {self.max_group_bytes} bytes, more than a group may have ({MAX_GROUP_BYTES}): "
                "lower evaluation.samples or sampling.max_new_tokens"
            )
        need = self.evaluation.num_prompts * self.max_group_bytes
        if need > self.limits.byte_budget:
            raise ValueError(
                f"limits.byte_budget: {self.evaluation.num_prompts} prompts of up to {self.max_group_bytes} bytes need "
                f"{need} bytes, the budget is {self.limits.byte_budget}: raise it, or take fewer prompts or samples"
            )
        return self

    @property
    def data_config(self) -> DataConfig:
        """Section `data` in the form of a training job, for code shared with training; only its held-out sources are
        used."""
        data = DataConfig(train=self.data.eval, eval=self.data.eval, prompt=self.data.prompt)
        return data if self.environment is None else data.with_tools(self.environment.schemas)

    @property
    def max_completion_tokens(self) -> int:
        """Upper bound of the tokens after a prompt, observations included."""
        return completion_tokens(self.sampling, self.environment)

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """Sampling settings of held-out completions."""
        return self.sampling

    @property
    def completions_per_group(self) -> int:
        """Completions per prompt."""
        return self.evaluation.completions

    @property
    def max_group_bytes(self) -> int:
        """Upper bound of the size of one stored group (bytes)."""
        return group_bytes(
            self.data.prompt.max_tokens, self.completions_per_group, self.max_completion_tokens,
            table_bytes=self.model.replay_bytes_per_token, turns=self.environment.max_turns if self.environment else 1,
        )  # fmt: skip
