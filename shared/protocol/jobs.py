"""The job record: desired spec and observed status, as stored and as the API shows it."""

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
    """A sign that training goes wrong or learns nothing; the job goes on."""

    model_config = ConfigDict(frozen=True)

    kind: WarningKind
    """``no_signal``: most groups have no variance; ``reward_stuck``: the reward does not rise; ``scorer_failures``:
    completions without a score; ``entropy_collapse``: the policy says always the same; ``truncation``: many
    completions are cut off; ``kl_spike``, ``gradient_spike``: one update was far larger than those before."""
    message: str
    since: datetime


class Condition(BaseModel):
    """One aspect of a job, in the manner of Kubernetes."""

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
    """Something asked of a job that is over when it was done: a checkpoint now, the prompt of a dead letter again, a
    version to be served, to go back to a checkpoint, or another number of workers."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["rl.operation"] = "rl.operation"
    kind: OperationKind
    args: dict[str, Any] = Field(default_factory=dict)
    by: str = ""
    """Id of the key that asked for it; `local`: somebody on this machine, where no keys are configured."""
    created_at: datetime
    state: Literal["pending", "succeeded", "failed"] = "pending"
    message: str = ""
    result: dict[str, Any] = Field(default_factory=dict)
    finished_at: datetime | None = None


class JobFailure(BaseModel):
    """Why a job failed."""

    model_config = ConfigDict(frozen=True)

    code: ErrorCode
    """``timeout``: `limits.timeout_s` is over; ``invalid_data``: a data set cannot be used; ``not_scored``: no scorer
    could score what was sampled; ``trainer_failed``, ``rollout_failed``: a worker cannot go on with the job;
    ``internal``: a defect."""
    message: str
    service: Literal["coordinator", "rollout", "trainer"] | None = None
    """Which service could not go on; None where none is at fault."""


class ModelOrigin(BaseModel):
    """Checkpoint of another job that a job began with, as it was found when the job was submitted."""

    model_config = ConfigDict(frozen=True)

    model: str
    """As the job file names it: `job:NAME@final`."""
    job: str
    """Id of the other job, and ``name`` its name."""
    name: str
    number: int
    """Policy updates before the checkpoint."""
    version: int
    digest: str
    """Digest of the weights, as the ledger has it."""
    path: str
    """Directory of the checkpoint on the coordinator's host."""

    @property
    def checkpoint(self) -> str:
        """The checkpoint by id and number, which always mean the same one."""
        return f"job:{self.job}@{self.number}"


class JobLinks(BaseModel):
    """Where the rest of a job is."""

    model_config = ConfigDict(frozen=True)

    self: str
    events: str
    metrics: str
    checkpoints: str
    logs: str


class JobProgress(BaseModel):
    """How far a job is."""

    model_config = ConfigDict(frozen=True)

    step: int
    """Policy updates completed."""
    max_steps: int | None
    """Those that it is to have at most; None where their number is not set."""
    fraction: float | None
    """Of ``max_steps``, 0 to 1; a job may end earlier."""
    groups: int
    """Groups that were trained."""


class JobStatus(BaseModel):
    """The coordinator's last observation."""

    model_config = ConfigDict(frozen=True)

    observed_generation: int = 0
    """Generation of the record that the run follows."""
    applies_at_step: int | None = None
    """First update, counted from 1, that generation ``observed_generation`` of the job file holds for; None where it
    changed nothing of the training."""

    phase: Phase = "pending"
    message: str = ""
    error: JobFailure | None = None
    """Of a job that failed."""
    attempt: int = 0
    """Control loops that led the job in turn: 1, and one more each time that another coordinator, or the same one after
    a fault of its own, took it up. 0: none yet."""
    heartbeat_at: datetime | None = None
    """When the coordinator that leads the job last wrote this, at least every 10 s while it leads."""
    step: int = 0
    """Policy updates completed."""
    policy_version: int = 0
    served_version: int | None = None
    """The version that agents are answered with, of a job with `online.promotion`; else they get the newest."""
    promoted_at: datetime | None = None
    """Since when that version is served."""
    canary: dict[str, Any] | None = None
    """The version on trial, the share of the conversations that it answers, and what was said of both arms so far."""
    total_steps: int | None = None
    expected_end: datetime | None = None
    """While it runs, of a run with ``total_steps``: when it is over, should it go on as fast as lately."""
    reward: float | None = None
    """Mean sampled reward of the newest batch."""
    draws: dict[str, Any] = Field(default_factory=dict)
    """drawn, trained, in_flight and dropped by reason: the ledger equation."""
    queues: dict[str, int] = Field(default_factory=dict)
    """Work waiting at each stage: tickets without a group, groups without a batch, batches that are not trained."""
    checkpoint: str | None = None
    best_checkpoint: dict[str, Any] | None = None
    """number, path, and by which metric, value and update: where `checkpoint.keep_best` is set."""
    conditions: list[Condition] = Field(default_factory=list)
    warnings: list[HealthWarning] = Field(default_factory=list)
    """Those that hold; of a job that is over, those that held at its end."""
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def progress(self) -> JobProgress:
        """How far it is."""
        fraction = min(1.0, self.step / self.total_steps) if self.total_steps else None
        trained = self.draws.get("trained", 0)
        return JobProgress(step=self.step, max_steps=self.total_steps, fraction=fraction, groups=trained)


class JobRecord(BaseModel):
    """A job. ``spec`` is the validated job file; ``revision`` is the store's and serves as ETag.

    ``generation`` counts what the user changed. ``changed_from`` is the revision that the newest such change replaced:
    whoever knows a later one knows that change, whatever the coordinator observed since.
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
    """Cancel without training what is sealed and without a last checkpoint."""
    last_checkpoint: bool = True
    """A cancelled job writes one more checkpoint, of what is trained by then."""
    extensions: int = 0
    """How often it was asked to go on after it had ended."""
    extended_at: datetime | None = None
    """When that was asked last."""
    operations: list[Operation] = Field(default_factory=list)
    """The newest ones, oldest first."""
    origin: ModelOrigin | None = None
    """Checkpoint that `model.path: job:NAME@WHICH` named."""
    fine_tuning: dict[str, Any] | None = None
    """Body of `POST /v1/fine_tuning/jobs`, where the job came from there."""
    trace: str = ""
    """Trace id of the request that submitted it: in everything that is sent and logged for the job."""
    status: JobStatus = JobStatus()

    @property
    def kind(self) -> str:
        """Kind of the job."""
        return str(self.spec.get("kind", "rl"))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def links(self) -> JobLinks:
        """Paths of the API."""
        own = f"/v1/jobs/{self.id}"
        parts = {name: f"{own}/{name}" for name in ("events", "metrics", "checkpoints", "logs")}
        return JobLinks(**{"self": own, **parts})

    def stored(self) -> bytes:
        """As the store keeps it: without what follows from the rest."""
        return self.model_dump_json(exclude={"links": True, "status": {"progress"}}).encode()
