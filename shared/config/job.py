"""The job file: everything a run needs, typed, frozen, validated before anything starts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.config.algorithm import AlgorithmConfig
from penstock.shared.config.base import StrictModel
from penstock.shared.config.data import DataConfig, Source
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.reward import RewardConfig

__all__ = [
    "CheckpointConfig",
    "EvaluationConfig",
    "JobConfig",
    "LimitsConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "SamplingConfig",
    "TrainConfig",
    "WarmStartConfig",
]

BYTES_PER_TOKEN = 24
"""A token's share in a stored group: id, log-prob and mask (9), its text, spans, frame padding."""
MAX_GROUP_BYTES = 7 << 20
"""Largest group that one message carries, below the bus's limit of 8 MB."""
GROUP_OVERHEAD_BYTES = 4096
"""Upper bound of a group's headers, answers and reward parts."""


class SamplingConfig(StrictModel):
    """How tokens are sampled. Training samples the untruncated distribution, so that log-probs mean what they say."""

    max_new_tokens: int = Field(64, ge=1)
    """Longest completion in tokens."""
    min_new_tokens: int = Field(0, ge=0)
    """No stop before this many tokens (stop tokens are masked out until then)."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by this; 0 is greedy (evaluation only)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (evaluation only; training needs 1)."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest tokens, 0 keeps all (evaluation only)."""
    stop: list[str] = Field(default_factory=list)
    """A completion ends after any of these strings; the tokens that wrote it stay part of the completion."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Further stop tokens beside the tokenizer's end-of-sequence."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens is larger than max_new_tokens")
        return self


class OptimizerConfig(StrictModel):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms, biases and embeddings are not decayed."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after warmup, over max_updates."""
    warmup_updates: int = Field(0, ge=0)
    """Updates of linear warmup."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The schedule ends at this fraction of the peak."""


class WarmStartConfig(StrictModel):
    """Supervised training on reference answers before version 0 is published."""

    steps: int = Field(0, ge=0)
    """Optimizer steps; 0 starts from the given weights."""
    batch_size: int = Field(64, ge=1)
    """Rows of a step."""
    learning_rate: float = Field(1e-3, gt=0)
    """Constant learning rate."""
    data: list[Source] = Field(default_factory=list)
    """Demonstrations; empty: the rows of `data.train`. Few answers may precede many prompts with only a checker."""


class TrainConfig(StrictModel):
    """Batch algebra, on-policy bound and length of a run."""

    batch_size: int = Field(128, ge=2)
    """Trajectories of one policy update; a multiple of the algorithm's group_size."""
    epochs: int = Field(1, ge=1, le=64)
    """Passes over a batch."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps of one pass; must divide the number of groups in a batch."""
    max_tokens_per_microbatch: int = Field(16384, ge=16)
    """Packed tokens of one forward/backward; only memory and speed depend on it."""
    max_updates: int | None = Field(None, ge=1)
    """Stop after this many policy updates."""
    data_epochs: int | None = Field(None, ge=1)
    """Stop after this many passes over the data. At least one of the two limits is needed."""
    max_lag: int = Field(0, ge=0, le=64)
    """Bound on (trainer version at the start of an update) - (oldest version in a group). 0 is strictly on-policy."""
    staleness: Literal["wait", "in_order", "drop"] = "wait"
    """What happens when an in-flight draw would pass the bound: wait for it, train in draw order, or drop it later."""
    oversample: float = Field(1.0, ge=1, le=8)
    """Draws in flight relative to what the bound needs."""
    draw_timeout_s: float = Field(120.0, gt=0)
    """Deadline of a draw from the moment it is dispatched; then it is dropped and redrawn."""
    stop_at_reward: float | None = None
    """Finish early once the mean reward of the last 10 batches reaches this."""

    @model_validator(mode="after")
    def _has_an_end(self) -> TrainConfig:
        if self.max_updates is None and self.data_epochs is None:
            raise ValueError("give max_updates or data_epochs: the run needs an end")
        return self


class CheckpointConfig(StrictModel):
    """Durability of the trainer's state."""

    every: int = Field(50, ge=1)
    """Policy updates between checkpoints; the coordinator may ask for one earlier when a stream fills."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept; the initial and the final one are kept beside them."""


class EvaluationConfig(StrictModel):
    """Held-out evaluation, at an exact version: no batch is sealed past a version that is still being evaluated."""

    every: int = Field(0, ge=0)
    """Policy updates between evaluations; 0 evaluates only where at_start / at_end say so."""
    at_start: bool = True
    """Evaluate version 0."""
    at_end: bool = True
    """Evaluate the final version."""
    num_prompts: int = Field(128, ge=1)
    """Held-out prompts, from the start of the evaluation data."""
    greedy: bool = True
    """One greedy completion of each prompt: `eval/greedy`."""
    samples: int = Field(0, ge=0, le=1024)
    """Sampled completions of each prompt, for `eval/avg@k` and `eval/pass@k`."""
    pass_k: list[int] = Field(default_factory=list)
    """The k of pass@k (unbiased estimator, arXiv 2107.03374 eq. 1); each at most `samples`."""
    sampling: SamplingConfig | None = None
    """Sampling of the sampled completions; default: the training sampling."""

    @model_validator(mode="after")
    def _k_fits(self) -> EvaluationConfig:
        if any(k < 1 or k > self.samples for k in self.pass_k):
            raise ValueError(f"each k of pass_k must lie in 1..samples ({self.samples})")
        return self


class LimitsConfig(StrictModel):
    """Budgets of one job on the shared streams."""

    byte_budget: int = Field(256 << 20, ge=1 << 10)
    """Bytes this job may hold in EXPERIENCE. (max_lag + 2) batches must fit in half of it."""
    timeout_s: float | None = Field(None, gt=0)
    """The job fails after this wall time."""


class PlacementConfig(StrictModel):
    """How the local services share the cores."""

    rollout_threads: int = Field(1, ge=1)
    """torch threads of each rollout worker."""
    trainer_threads: int = Field(1, ge=1)
    """torch threads of the trainer. Part of the replay contract: another count may change the last bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where trainer and sampler compute; `auto` takes a GPU where torch sees one."""
    max_running: int = Field(256, ge=1)
    """Sequences that one rollout engine decodes at once (slots of its KV cache)."""


class JobConfig(StrictModel):
    """A reinforcement-learning job over a causal language model."""

    kind: Literal["rl"] = "rl"
    """What kind of job this is; `rl` trains on a data set of prompts."""
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Short name, for people."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """The one seed from which every draw, shuffle and initialisation derives."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Training and held-out prompts."""
    reward: RewardConfig
    """How completions are scored."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantages and loss."""
    sampling: SamplingConfig = SamplingConfig()
    """How training completions are sampled."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised steps before version 0."""
    train: TrainConfig
    """Batch algebra, on-policy bound, length of the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Durability of the trainer's state."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    limits: LimitsConfig = LimitsConfig()
    """Budgets of the job on shared streams."""
    placement: PlacementConfig = PlacementConfig()
    """How the services share the cores."""
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    """Free labels."""

    @model_validator(mode="after")
    def _batch_algebra(self) -> JobConfig:
        batch, group = self.train.batch_size, self.algorithm.group_size
        if batch % group:
            raise ValueError(f"train.batch_size {batch} is not divisible by algorithm.group_size {group}")
        if self.groups_per_batch % self.train.minibatches:
            raise ValueError(
                f"the {self.groups_per_batch} groups of a batch are not divisible by train.minibatches "
                f"{self.train.minibatches}: a group never straddles two optimizer steps"
            )
        return self

    @model_validator(mode="after")
    def _training_samples_untruncated(self) -> JobConfig:
        s = self.sampling
        if s.temperature == 0 or s.top_p != 1 or s.top_k != 0:
            raise ValueError(
                "sampling: training needs temperature > 0, top_p = 1 and top_k = 0 (log-probs of a truncated "
                "distribution bias the ratio); put other values under evaluation.sampling"
            )
        return self

    @model_validator(mode="after")
    def _budget_holds_the_pipeline(self) -> JobConfig:
        if self.max_group_bytes > MAX_GROUP_BYTES:
            raise ValueError(
                f"a group of {self.algorithm.group_size} completions of up to {self.sampling.max_new_tokens} tokens "
                f"may take {self.max_group_bytes} bytes, more than one message carries ({MAX_GROUP_BYTES}): "
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
        """The data section as the warm start sees it."""
        return self.data.model_copy(update={"train": self.warm_start.data}) if self.warm_start.data else self.data

    @property
    def groups_per_batch(self) -> int:
        """Groups (prompts) of one policy update."""
        return self.train.batch_size // self.algorithm.group_size

    @property
    def max_group_bytes(self) -> int:
        """Upper bound of one stored group, in bytes."""
        tokens = self.data.prompt.max_tokens + self.algorithm.group_size * self.sampling.max_new_tokens
        return GROUP_OVERHEAD_BYTES + 64 * self.algorithm.group_size + BYTES_PER_TOKEN * tokens

    @property
    def max_draws(self) -> int:
        """Most draws that are not terminal at any moment."""
        t = self.train
        return max(self.groups_per_batch, int((t.max_lag + 1) * self.groups_per_batch * t.oversample))
