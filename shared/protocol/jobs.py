"""Job record: desired spec and observed status, as stored and as returned by the API."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

__all__ = [
    "PHASES",
    "TERMINAL_PHASES",
    "Condition",
    "DesiredState",
    "ErrorCode",
    "HealthWarning",
    "JobFailure",
    "JobLinks",
    "JobProgress",
    "JobRecord",
    "JobStatus",
    "ModelOrigin",
    "Operation",
    "OperationKind",
    "Phase",
    "WarningKind",
]

Phase = Literal["pending", "running", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"]
PHASES: tuple[Phase, ...] = (
    "pending",
    "running",
    "pausing",
    "paused",
    "cancelling",
    "succeeded",
    "failed",
    "cancelled",
)
TERMINAL_PHASES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
DesiredState = Literal["running", "paused", "cancelled"]
OperationKind = Literal["checkpoint", "replay_dead_letter", "promote", "rollback", "scale"]
ErrorCode = Literal[
    "timeout", "invalid_data", "environment_failed", "not_scored", "trainer_failed", "rollout_failed", "internal"
]  # fmt: skip

WarningKind = Literal[
    "no_signal", "reward_stuck", "scorer_failures", "entropy_collapse", "truncation", "kl_spike", "gradient_spike"
]  # fmt: skip


class HealthWarning(BaseModel):
    """Warning that training diverges or learns nothing; the job continues."""

    model_config = ConfigDict(frozen=True)

    kind: WarningKind
    """``no_signal``: most groups have no variance; ``reward_stuck``: the reward does not rise; ``scorer_failures``:
    completions without a score, or episodes lost with their simulators; ``entropy_collapse``: the policy's outputs
    hardly vary; ``truncation``: many completions hit the length limit; ``kl_spike``, ``gradient_spike``: one update was
    far larger than those before."""
    message: str
    since: datetime


class Condition(BaseModel):
    """Condition of a job with its status and reason, as in Kubernetes."""

    model_config = ConfigDict(frozen=True)

    type: Literal[
        "WorkersReady", "WeightsSynced", "ClocksAgree", "MakingProgress", "Checkpointed", "PromotionAllowed",
        "Succeeded",
    ]  # fmt: skip
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: datetime


class Operation(BaseModel):
    """One-time operation on a job: write a checkpoint, redraw the prompt of a dead letter, serve a version, roll
    back to a checkpoint, or change the number of workers."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["rl.operation"] = "rl.operation"
    kind: OperationKind
    args: dict[str, Any] = Field(default_factory=dict)
    by: str = ""
    """Id of the key that requested the operation; `local`: the request came from this machine while no keys are
    configured."""
    created_at: datetime
    state: Literal["pending", "succeeded", "failed"] = "pending"
    message: str = ""
    result: dict[str, Any] = Field(default_factory=dict)
    finished_at: datetime | None = None


class JobFailure(BaseModel):
    """Cause of a failed job, and the service at fault."""

    model_config = ConfigDict(frozen=True)

    code: ErrorCode
    """``timeout``: `limits.timeout_s` was exceeded; ``invalid_data``: a data set cannot be used;
    ``environment_failed``: the simulator cannot be created; ``not_scored``: no scorer could score the samples, or no
    simulator could play the episodes; ``trainer_failed``, ``rollout_failed``: a worker cannot continue the job;
    ``internal``: a defect."""
    message: str
    service: Literal["coordinator", "rollout", "env", "reward", "trainer"] | None = None
    """Service that failed; None if no service is at fault."""


class ModelOrigin(BaseModel):
    """Checkpoint of another job from which this job started, resolved when the job was submitted."""

    model_config = ConfigDict(frozen=True)

    model: str
    """Reference in the job file: `job:NAME@final`."""
    job: str
    """Id of the other job; ``name`` is its name."""
    name: str
    number: int
    """Policy updates before the checkpoint."""
    version: int
    digest: str
    """Digest of the weights, as recorded in the ledger."""
    path: str
    """Directory of the checkpoint on the coordinator's host."""

    @property
    def checkpoint(self) -> str:
        """Reference to the checkpoint by job id and number; unlike names and selectors such as `final`, it always means
        the same checkpoint."""
        return f"job:{self.job}@{self.number}"


class JobLinks(BaseModel):
    """API paths of a job's resources."""

    model_config = ConfigDict(frozen=True)

    self: str
    events: str
    metrics: str
    checkpoints: str
    logs: str


class JobProgress(BaseModel):
    """Completed policy updates and trained groups of a job."""

    model_config = ConfigDict(frozen=True)

    step: int
    """Policy updates completed."""
    max_steps: int | None
    """Largest number of policy updates; None if not set."""
    fraction: float | None
    """Completed fraction of ``max_steps``, 0 to 1; a job may end earlier."""
    groups: int
    """Groups trained."""


class JobStatus(BaseModel):
    """Status of a job, as the coordinator last observed it."""

    model_config = ConfigDict(frozen=True)

    observed_generation: int = 0
    """Generation of the record that the run has applied."""
    applies_at_step: int | None = None
    """First update, counted from 1, to which generation ``observed_generation`` of the job file applies; None if it
    did not change the training."""

    phase: Phase = "pending"
    message: str = ""
    error: JobFailure | None = None
    """Cause of the failure; None unless the job failed."""
    attempt: int = 0
    """Number of control loops that have led the job so far; 0: none yet. A new loop begins when another coordinator
    takes up the job, or when its coordinator takes it up again after an internal fault."""
    heartbeat_at: datetime | None = None
    """Time at which the leading coordinator last wrote this status, at least every 10 s while it leads."""
    step: int = 0
    """Policy updates completed."""
    policy_version: int = 0
    served_version: int | None = None
    """Version served to agents, in jobs with `online.promotion`; null: the newest."""
    promoted_at: datetime | None = None
    """Time since which ``served_version`` is served."""
    canary: dict[str, Any] | None = None
    """State of the canary trial: the version on trial, its share of the conversations, and the feedback so far on this
    version and on the served one."""
    total_steps: int | None = None
    expected_end: datetime | None = None
    """Expected end of a running job with ``total_steps``, at its recent speed."""
    reward: float | None = None
    """Mean reward of the samples in the newest batch."""
    draws: dict[str, Any] = Field(default_factory=dict)
    """Numbers of draws: drawn, trained, in_flight, and dropped by reason. The first is the sum of the others."""
    queues: dict[str, int] = Field(default_factory=dict)
    """Work waiting at each stage: tickets without a group, groups without a batch, untrained batches."""
    checkpoint: str | None = None
    best_checkpoint: dict[str, Any] | None = None
    """Best checkpoint if `checkpoint.keep_best` is set: number, path, metric, value and update."""
    conditions: list[Condition] = Field(default_factory=list)
    warnings: list[HealthWarning] = Field(default_factory=list)
    """Current warnings; for a job that has ended, those at its end."""
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def progress(self) -> JobProgress:
        """Progress of the job."""
        fraction = min(1.0, self.step / self.total_steps) if self.total_steps else None
        trained = self.draws.get("trained", 0)
        return JobProgress(step=self.step, max_steps=self.total_steps, fraction=fraction, groups=trained)


class JobRecord(BaseModel):
    """A job as stored and as returned by the API. ``spec`` is the validated job file; ``revision`` is the store's
    revision of the record and serves as ETag.

    ``generation`` counts changes by users. ``changed_from`` is the revision that the newest such change replaced: a
    client with a later revision has seen that change, whatever the coordinator observed since.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["rl.job"] = "rl.job"
    name: str
    created_at: datetime
    generation: int = 1
    revision: int = 0
    changed_from: int = 0
    spec: dict[str, Any]
    desired_state: DesiredState = "running"
    force: bool = False
    """True: cancel without training sealed batches and without a last checkpoint."""
    last_checkpoint: bool = True
    """True: write a checkpoint of the trained state when the job is cancelled."""
    extensions: int = 0
    """Number of times that the job was extended after it had ended."""
    extended_at: datetime | None = None
    """Time of the last extension."""
    operations: list[Operation] = Field(default_factory=list)
    """Newest operations, oldest first."""
    origin: ModelOrigin | None = None
    """Checkpoint that `model.path: job:NAME@WHICH` was resolved to."""
    fine_tuning: dict[str, Any] | None = None
    """Body of `POST /v1/fine_tuning/jobs`, if the job was submitted there."""
    trace: str = ""
    """Trace id of the request that submitted the job, included in all its messages and log lines."""
    status: JobStatus = JobStatus()

    @property
    def kind(self) -> str:
        """Kind of the job."""
        return str(self.spec.get("kind", "rl"))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def links(self) -> JobLinks:
        """API paths of the job's resources."""
        own = f"/v1/jobs/{self.id}"
        parts = {name: f"{own}/{name}" for name in ("events", "metrics", "checkpoints", "logs")}
        return JobLinks(**{"self": own, **parts})

    def stored(self) -> bytes:
        """Return the record as JSON for the store, without derived fields."""
        return self.model_dump_json(exclude={"links": True, "status": {"progress"}}).encode()
