"""Bodies and replies of ``/v1/fine_tuning/jobs`` in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.shared.config.rewards.graders import InlineGrader

__all__ = [
    "Checkpoint",
    "CheckpointPage",
    "Event",
    "EventPage",
    "FineTuningJob",
    "FineTuningRequest",
    "Hyperparameters",
    "JobError",
    "JobPage",
    "Reinforcement",
]

Auto = Literal["auto"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Hyperparameters(_Strict):
    """Settings of a run; `auto` takes a value from the base model's file, or from the data."""

    n_epochs: Annotated[int, Field(ge=1, le=10_000)] | Auto = Field("auto", description="Passes over the training file")
    batch_size: Annotated[int, Field(ge=1, le=100_000)] | Auto = Field("auto", description="Rows of a policy update")
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1000)] | Auto = Field(
        "auto", description="Factor on the learning rate of the base model's file"
    )
    compute_multiplier: Annotated[float, Field(gt=0, le=64)] | Auto = Field(
        "auto", description="Factor on the completions of each row"
    )
    eval_interval: Annotated[int, Field(ge=1)] | Auto = Field("auto", description="Policy updates between evaluations")
    eval_samples: Annotated[int, Field(ge=1, le=1024)] | Auto = Field(
        "auto", description="Sampled completions of each row of the validation file"
    )


class Reinforcement(_Strict):
    """Reinforcement learning with a grader."""

    grader: InlineGrader
    hyperparameters: Hyperparameters = Hyperparameters()


class Method(_Strict):
    """Training method. `supervised` and `dpo` are refused with a reason."""

    type: Literal["reinforcement", "supervised", "dpo"]
    reinforcement: Reinforcement | None = None
    supervised: dict[str, Any] | None = None
    dpo: dict[str, Any] | None = None


class WandbProject(_Strict):
    """A project at Weights & Biases."""

    project: str = Field(min_length=1, max_length=128)
    entity: str | None = Field(None, max_length=128)


class Integration(_Strict):
    """Additional destination of metrics."""

    type: Literal["wandb"]
    wandb: WandbProject


class FineTuningRequest(_Strict):
    """Request for a new job."""

    model: str = Field(min_length=1, max_length=1024, description="A base model of the deployment, a model directory, "
                       "or `job:NAME@final`, a checkpoint of another job")  # fmt: skip
    training_file: str = Field(max_length=64, description="Id of an uploaded file")
    validation_file: str | None = Field(None, max_length=64)
    method: Method
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    suffix: str | None = Field(None, min_length=1, max_length=64, description="Part of the job's name")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    integrations: list[Integration] | None = Field(None, max_length=4)


class JobError(BaseModel):
    """Error of a failed job."""

    code: str
    message: str
    param: str | None = None


class FineTuningJob(BaseModel):
    """A job in OpenAI's format; `/v1/jobs` shows the job with all its fields under the same id."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None = None
    estimated_finish: int | None = None
    model: str
    fine_tuned_model: str | None = Field(None, description="Value for `model` of another job")
    organization_id: str = "penstock"
    status: Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
    error: JobError | None = None
    training_file: str
    validation_file: str | None = None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    result_files: list[str] = []
    seed: int
    trained_tokens: int | None = None
    metadata: dict[str, str] = {}
    integrations: list[dict[str, Any]] = []


class _Page(BaseModel):
    """One page, newest first. Pass the id of its last entry as ``after`` to get the next page."""

    object: Literal["list"] = "list"
    has_more: bool = False


class JobPage(_Page):
    """Page of jobs."""

    data: list[FineTuningJob]


class Event(BaseModel):
    """A message about a job for its users."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any] = {}


class EventPage(_Page):
    """Page of events of a job."""

    data: list[Event]


class Checkpoint(BaseModel):
    """A checkpoint, with the `metrics` of its update."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str = Field(description="Value for `model` of another job")
    step_number: int
    metrics: dict[str, float]


class CheckpointPage(_Page):
    """Page of checkpoints of a job."""

    data: list[Checkpoint]
    first_id: str | None = None
    last_id: str | None = None
