"""Conversion of jobs, events and checkpoints to OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from penstock.services.coordinator.finetuning.models import Checkpoint, Event, FineTuningJob, JobError
from penstock.shared.protocol.jobs import JobRecord, JobStatus, Phase

__all__ = ["shown_checkpoint", "shown_event", "shown_job"]

Row = Mapping[str, Any]
Shown = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
_STATUS: dict[Phase, Shown] = {
    "pending": "queued",
    "running": "running",
    "pausing": "running",
    "paused": "paused",
    "cancelling": "running",
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
}
_LEVELS: dict[str, Literal["info", "warn", "error"]] = {"warning": "warn", "error": "error"}


def shown_job(record: JobRecord) -> FineTuningJob:
    """Convert a job that came from a fine-tuning request."""
    origin, status = record.fine_tuning, record.status
    assert origin is not None, f"{record.id} is no fine-tuning job"
    failed = status.phase == "failed"
    return FineTuningJob(
        id=record.id,
        created_at=int(record.created_at.timestamp()),
        finished_at=int(status.finished_at.timestamp()) if status.finished_at is not None else None,
        model=origin["model"],
        estimated_finish=_estimate(status),
        fine_tuned_model=f"job:{record.id}@final" if status.phase == "succeeded" else None,
        status=_STATUS[status.phase],
        error=JobError(code="job_failed", message=status.message or "failed") if failed else None,
        training_file=origin["training_file"],
        validation_file=origin.get("validation_file"),
        hyperparameters=origin["hyperparameters"],
        method=origin["method"],
        seed=record.spec.get("seed", 0),
        metadata=record.spec.get("metadata", {}),
        integrations=origin.get("integrations") or [],
    )


def _estimate(status: JobStatus) -> int | None:
    end = status.expected_end
    return int(end.timestamp()) if end is not None and status.phase == "running" else None


def shown_event(seq: int, row: Row) -> Event:
    """Convert a row of the job's events."""
    return Event(
        id=f"ftevent-{seq}",
        created_at=int(row["time"]),
        level=_LEVELS.get(row["level"], "info"),
        message=row["message"],
        data={"type": row["type"], **(row.get("data") or {})},
    )


def shown_checkpoint(job: str, row: Row) -> Checkpoint:
    """Convert a checkpoint of a job."""
    number = row["number"]
    return Checkpoint(
        id=f"ftckpt-{number}",
        created_at=int(row["time"]),
        fine_tuning_job_id=job,
        fine_tuned_model_checkpoint=f"job:{job}@{number}",
        step_number=number,
        metrics={"step": float(number)},
    )
