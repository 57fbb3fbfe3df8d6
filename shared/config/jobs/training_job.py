"""Keys and properties shared by all jobs with a trainer, whatever their policy is."""

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
"""Largest group in bytes: a group is stored atomically, in parts of 1 MiB, and held in memory by its writer and
readers."""


class RunConfig(StrictModel):
    """Batch size, lag bound and length of a run."""

    batch_size: int = Field(128, ge=2)
    """Trajectories per policy update; a multiple of the algorithm's group_size."""
    max_updates: int | None = Field(None, ge=1)
    """Stop after this many policy updates; null: no limit."""
    max_lag: int = Field(0, ge=0, le=64)
    """Bound on (trainer version at the start of an update) - (oldest version in a group). 0: strictly on-policy."""
    staleness: Literal["wait", "in_order", "drop"] = "wait"
    """Handling of an in-flight draw that would be too old for the next update. `wait`: hold the batch back until the
    draw has its group or misses its deadline; `in_order`: train all draws in data order; `drop`: do not wait, and drop
    the draw once its lag exceeds `max_lag`."""
    oversample: float = Field(1.0, ge=1, le=8)
    """Number of in-flight draws, as a multiple of what the lag bound requires. The additional draws replace groups that
    a batch would lack; draws not trained in time are dropped as stale."""
    draw_timeout_s: float = Field(120.0, gt=0)
    """Deadline of a draw after its dispatch (seconds). A draw that misses it is dropped and redrawn: at most four
    times, or without limit while no groups arrive at all."""
    on_nonfinite: Literal["pause", "skip"] = "pause"
    """Handling of a non-finite loss or gradient: pause the job and keep the batch, or skip the optimizer step."""
    max_mismatch: float | None = Field(1.0, gt=0)
    """Largest difference between sampling policy and trained policy (nats per token or action dimension). The job
    pauses after an update whose `mismatch/logprob` exceeds it, or after `max_lag` + 1 updates in a row whose
    `lag/logprob` exceeds it. Typical differences: 0.01 for one version of lag; up to 2.4, in `max_lag` batches, after
    one very large update; about 2, in every batch, for a KV cache that was computed with old weights. Not applied to
    `sac`, which trains on old transitions; null: never pause."""


class CheckpointConfig(StrictModel):
    """Frequency and retention of checkpoints."""

    every: int = Field(50, ge=1)
    """Policy updates between checkpoints; the coordinator may request one earlier when a stream fills."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep, in addition to the initial and the final one."""
    keep_best: KeepBestConfig | None = None
    """Metric by which the best checkpoint is kept, too; null: only the newest, the initial and the final one are
    kept."""


class LimitsConfig(StrictModel):
    """Limits of one job: bytes in the stream EXPERIENCE, and wall time."""

    byte_budget: int = Field(256 << 20, ge=1 << 10)
    """Bytes that this job may occupy in the stream EXPERIENCE. (max_lag + 2) batches must fit in half of it."""
    timeout_s: float | None = Field(None, gt=0)
    """Wall time after which the job fails (seconds); null: no limit."""


class PlacementConfig(StrictModel):
    """Threads and devices of the services."""

    rollout_threads: int = Field(1, ge=1)
    """torch threads of each rollout worker."""
    trainer_threads: int = Field(1, ge=1)
    """torch threads of the trainer. Another number may change the last bits of results, and so the outcome of a
    replay."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and sampler; `auto` uses a GPU if torch finds one."""
    max_running: int = Field(256, ge=1)
    """Largest number of sequences that one rollout engine decodes at once (slots of its KV cache)."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one trainer device at the model's dtype, for the metric `speed/mfu`; null: not reported."""


def known_kind(kind: Any) -> Any:
    """Return ``kind`` unchanged. Raises ValueError, with a list of the valid kinds, if ``kind`` is unknown."""
    if kind not in KIND_NAMES:
        raise ValueError(f"found {kind!r}; must be {', '.join(map(repr, KIND_NAMES[:-1]))} or {KIND_NAMES[-1]!r}")
    return kind


class TrainingJob(StrictModel, ABC):
    """Base of jobs with a trainer, a ledger and checkpoints, whatever their policy is.

    The coordinator decides about draws and batches by the fields and properties of this class alone.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Short name for display."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of every draw, shuffle and initialisation."""
    algorithm: AlgorithmConfig | EmbodiedAlgorithm
    """Algorithm, which defines advantages and loss."""
    backend: BackendConfig = LocalConfig()
    """Training backend, which holds and shards the model."""
    train: RunConfig
    """Batch size, lag bound and length of the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Frequency and retention of checkpoints."""
    evaluation: EvaluationConfig | EpisodeEvaluationConfig
    """Held-out evaluation."""
    early_stop: EarlyStopConfig | None = None
    """Condition for ending the run before its last update; null: none."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of the job: bytes in the stream EXPERIENCE, and wall time."""
    placement: PlacementConfig = PlacementConfig()
    """Threads and devices of the services."""
    tracking: list[TrackerConfig] = Field(default_factory=list)
    """Metric trackers, in addition to the metrics stream."""
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    """Labels that the user chooses freely."""

    @model_validator(mode="after")
    def _batch_holds_whole_groups(self) -> TrainingJob:
        batch, group = self.train.batch_size, self.algorithm.group_size
        if batch % group:
            raise ValueError(f"train.batch_size {batch} is not divisible by algorithm.group_size {group}")
        return self

    @property
    @abstractmethod
    def services(self) -> tuple[str, ...]:
        """Worker services that the job needs to make progress."""

    @property
    @abstractmethod
    def max_group_bytes(self) -> int:
        """Upper bound of the size of one stored group (bytes)."""

    @property
    def data_epochs(self) -> int | None:
        """Passes over the data after which the run ends; None: the data set is endless or other keys end the run."""
        return None

    @property
    def train_sources(self) -> list[str]:
        """Names of the sources of training prompts; empty: the job does not distinguish sources."""
        return []

    @property
    def completions_per_group(self) -> int:
        """Number of completions or episodes in one group, including the greedy one if the algorithm uses it as
        baseline."""
        return self.algorithm.group_size + self.algorithm.greedy_baseline

    @property
    def groups_per_batch(self) -> int:
        """Groups per policy update."""
        return self.train.batch_size // self.algorithm.group_size

    @property
    def max_draws(self) -> int:
        """Largest number of draws (attempts to generate a group) that may be open at once, i.e. neither trained nor
        dropped."""
        t = self.train
        return max(self.groups_per_batch, int((t.max_lag + 1) * self.groups_per_batch * t.oversample))
