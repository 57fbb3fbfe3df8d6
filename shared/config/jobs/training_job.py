"""Keys and properties that every job with a trainer shares, whatever its policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.shared.config.algorithm import AlgorithmConfig
from penstock.shared.config.backend import BackendConfig, LocalConfig
from penstock.shared.config.base import StrictModel
from penstock.shared.config.embodied import EmbodiedAlgorithm, EpisodeEvaluationConfig
from penstock.shared.config.evaluation import EvaluationConfig
from penstock.shared.config.goals import EarlyStopConfig, KeepBestConfig
from penstock.shared.config.tracking import TrackerConfig

__all__ = [
    "KIND_NAMES",
    "MAX_GROUP_BYTES",
    "CheckpointConfig",
    "LimitsConfig",
    "PlacementConfig",
    "RunConfig",
    "TrainingJob",
    "known_kind",
]

KIND_NAMES = ("rl", "online_rl", "embodied", "evaluation", "serving")
"""Kinds of jobs that a file may describe."""
MAX_GROUP_BYTES = 64 << 20
"""Largest group: it is stored all or none, in parts of 1 MiB, and held in memory by who writes and who reads it."""


class RunConfig(StrictModel):
    """Batch algebra, on-policy bound and length of a run."""

    batch_size: int = Field(128, ge=2)
    """Trajectories of one policy update; a multiple of the algorithm's group_size."""
    max_updates: int | None = Field(None, ge=1)
    """Stop after this many policy updates."""
    max_lag: int = Field(0, ge=0, le=64)
    """Bound on (trainer version at the start of an update) - (oldest version in a group). 0 is strictly on-policy."""
    staleness: Literal["wait", "in_order", "drop"] = "wait"
    """Treatment of an in-flight draw that would pass the bound: wait for it, train in draw order, or drop it later."""
    oversample: float = Field(1.0, ge=1, le=8)
    """Draws in flight relative to what the bound needs; those above it make up for groups that a batch lacks, and what
    is not trained in time is dropped as stale."""
    draw_timeout_s: float = Field(120.0, gt=0)
    """Deadline of a draw from the moment it is dispatched; then it is dropped and redrawn, at most four times while
    other prompts are answered."""
    on_nonfinite: Literal["pause", "skip"] = "pause"
    """A loss or gradient that is not finite: pause the job with the batch kept, or leave out that optimizer step."""
    max_mismatch: float | None = Field(1.0, gt=0)
    """Pause the job after an update whose `mismatch/logprob` or `lag/logprob` is larger: what sampled the tokens is not
    what trains on them (nats per token or action dimension). One version of lag makes about 0.01, a cache of old
    weights about 2.
    `sac`, which keeps old transitions, is not held to it; null: no job is."""


class CheckpointConfig(StrictModel):
    """Durability of the trainer's state."""

    every: int = Field(50, ge=1)
    """Policy updates between checkpoints; the coordinator may ask for one earlier when a stream fills."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept; the initial and the final one are kept beside them."""
    keep_best: KeepBestConfig | None = None
    """Keep the best checkpoint by a metric, too."""


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
    peak_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one trainer device at the model's dtype, for the metric `speed/mfu`; null: not reported."""


def known_kind(kind: Any) -> Any:
    """Refuse an unknown kind by name."""
    if kind not in KIND_NAMES:
        raise ValueError(f"found {kind!r}; must be {', '.join(map(repr, KIND_NAMES[:-1]))} or {KIND_NAMES[-1]!r}")
    return kind


class TrainingJob(StrictModel, ABC):
    """A job with a trainer, a ledger and checkpoints, whatever its policy is.

    The coordinator decides about draws and batches by these fields and properties alone.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Short name, for people."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """The one seed from which every draw, shuffle and initialisation derives."""
    algorithm: AlgorithmConfig | EmbodiedAlgorithm
    """Advantages and loss."""
    backend: BackendConfig = LocalConfig()
    """Where and how the trainer holds the model."""
    train: RunConfig
    """Batch algebra, on-policy bound, length of the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Durability of the trainer's state."""
    evaluation: EvaluationConfig | EpisodeEvaluationConfig
    """Held-out evaluation."""
    early_stop: EarlyStopConfig | None = None
    """When the run ends before its last update."""
    limits: LimitsConfig = LimitsConfig()
    """Budgets of the job on shared streams."""
    placement: PlacementConfig = PlacementConfig()
    """How the services share the cores."""
    tracking: list[TrackerConfig] = Field(default_factory=list)
    """Where the metrics are written beside their stream."""
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    """Free labels."""

    @model_validator(mode="after")
    def _batch_holds_whole_groups(self) -> TrainingJob:
        batch, group = self.train.batch_size, self.algorithm.group_size
        if batch % group:
            raise ValueError(f"train.batch_size {batch} is not divisible by algorithm.group_size {group}")
        return self

    @property
    @abstractmethod
    def services(self) -> tuple[str, ...]:
        """Worker services without which the job stands still."""

    @property
    @abstractmethod
    def max_group_bytes(self) -> int:
        """Upper bound of one stored group, in bytes."""

    @property
    def data_epochs(self) -> int | None:
        """Passes over the data after which the run ends; None: the data have no end."""
        return None

    @property
    def train_sources(self) -> list[str]:
        """Names of the sources that training prompts come from; empty: there are none to tell apart."""
        return []

    @property
    def completions_per_group(self) -> int:
        """Trajectories of one draw, a greedy one that serves as a baseline included."""
        return self.algorithm.group_size + self.algorithm.greedy_baseline

    @property
    def groups_per_batch(self) -> int:
        """Groups of one policy update."""
        return self.train.batch_size // self.algorithm.group_size

    @property
    def max_draws(self) -> int:
        """Most draws that are not terminal at any moment."""
        t = self.train
        return max(self.groups_per_batch, int((t.max_lag + 1) * self.groups_per_batch * t.oversample))
