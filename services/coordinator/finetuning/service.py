"""Service for fine-tuning requests: submits them as jobs, and shows such jobs in OpenAI's format."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Literal

from penstock.services.coordinator.files import FileStore
from penstock.services.coordinator.finetuning.base import BaseModelFile, open_base
from penstock.services.coordinator.finetuning.job_file import DataFile, job_file
from penstock.services.coordinator.finetuning.models import (
    Checkpoint,
    CheckpointPage,
    Event,
    EventPage,
    FineTuningJob,
    FineTuningRequest,
    JobError,
    JobPage,
)
from penstock.services.coordinator.graders import scorer_of
from penstock.services.coordinator.jobs.events import JobEvents
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.origins import Origins
from penstock.services.coordinator.submission import Submissions
from penstock.services.coordinator.training.checkpoints import Checkpoints
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.model import REFERENCE, parse_reference
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Flaw, Invalid, NotFound
from penstock.shared.protocol.jobs import JobRecord, JobStatus, Phase

__all__ = ["FineTuningService"]

Row = dict[str, Any]
ALL = 1_000_000
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
_EVENT_LEVELS: dict[str, Literal["info", "warn", "error"]] = {"warning": "warn", "error": "error"}


class FineTuningService:
    """Jobs that fine-tuning requests created. Methods that take a job id raise NotFound for a job created otherwise."""

    def __init__(
        self, submissions: Submissions, files: FileStore, settings: ServiceSettings, *, jobs: JobStore,
        events: JobEvents, checkpoints: Checkpoints, origins: Origins,
    ) -> None:  # fmt: skip
        self._submissions, self._jobs, self._events = submissions, jobs, events
        self._checkpoints, self._origins, self._files, self._settings = checkpoints, origins, files, settings

    async def create(self, wanted: FineTuningRequest, *, key: str) -> FineTuningJob:
        """Submit a fine-tuning request as a job, and return the job in OpenAI's format.

        Raises:
            Invalid: the error has pointers into the request, or to lines of its files.
            ConfigError: the job cannot run on this deployment.
        """
        try:
            base = await self._base(wanted.model)
        except ConfigError as error:
            raise _refused("/model", str(error)) from None
        config, chosen = await asyncio.to_thread(self._job_file, wanted, base)
        request = wanted.model_dump(mode="json", exclude_unset=True)
        origin = {**request, "hyperparameters": chosen, "base": base.name}
        return _shown_job(await self._submissions.submit(config, request, key=key, fine_tuning=origin))

    def _job_file(self, wanted: FineTuningRequest, base: BaseModelFile) -> tuple[JobConfig, Row]:
        training = self._file("/training_file", wanted.training_file)
        validation = None
        if wanted.validation_file is not None:
            validation = self._file("/validation_file", wanted.validation_file)
        return job_file(wanted, base, training, validation, scorer=lambda grader: scorer_of(grader, self._settings))

    def _file(self, pointer: str, id: str) -> DataFile:
        try:
            return DataFile(self._files.content(id), self._files.find(id).rows)
        except NotFound as error:
            raise _refused(pointer, str(error)) from None

    async def _base(self, model: str) -> BaseModelFile:
        """Return the partial job file on which a job for ``model`` is based; ``model`` names a base model or a
        checkpoint.

        For a checkpoint of a fine-tuning job this is the base of that job, with the weights of the checkpoint.
        """
        folder = self._settings.base_models
        if not model.startswith(REFERENCE):
            return await asyncio.to_thread(open_base, model, folder)
        try:
            made_by = await self._origins.job(parse_reference(model)[0])
            origin = (await self._jobs.get(made_by.id)).fine_tuning or {}
        except NotFound as error:
            raise ConfigError(str(error)) from None
        if name := origin.get("base"):
            return (await asyncio.to_thread(open_base, name, folder)).with_model(model)
        return BaseModelFile("", {"model": {"path": model}})

    async def get(self, job: str) -> JobRecord:
        """Return the record of a fine-tuning job. Raises NotFound."""
        record = await self._jobs.get(job)
        if record.fine_tuning is None:
            raise NotFound(f"job '{job}' is no fine-tuning job; it is shown at /v1/jobs/{job}")
        return record

    def shown(self, record: JobRecord) -> FineTuningJob:
        """Convert the record of a fine-tuning job to OpenAI's format."""
        return _shown_job(record)

    async def page(
        self, *, after: str | None, limit: int, labels: dict[str, str], models: frozenset[str] | None
    ) -> JobPage:
        """List fine-tuning jobs, newest first.

        Args:
            after: id of the last job of the previous page.
            labels: entries that a job's metadata must contain.
            models: names or ids of the only jobs to list; None for all.
        """
        index = await self._jobs.index()
        jobs = (job for job in reversed(index.of_models(models)) if job.fine_tuned)
        jobs = (job for job in jobs if after is None or job.id < after)
        found = list(itertools.islice((job for job in jobs if labels.items() <= job.labels.items()), limit + 1))
        return JobPage(data=[_shown_job(job.record()) for job in found[:limit]], has_more=len(found) > limit)

    async def events(self, job: str, *, after: str | None, limit: int) -> EventPage:
        """List events, newest first."""
        await self.get(job)
        rows = await self._events.page(job, after=0, limit=ALL)
        below = _place(after)
        found = [_shown_event(seq, row) for seq, row in reversed(rows) if below is None or seq < below]
        return EventPage(data=found[:limit], has_more=len(found) > limit)

    async def checkpoints(self, job: str, *, after: str | None, limit: int) -> CheckpointPage:
        """List checkpoints, newest first."""
        await self.get(job)
        below = _place(after)
        rows = [row for row in reversed(await self._checkpoints.rows(job)) if below is None or row["number"] < below]
        page = [_shown_checkpoint(job, row) for row in rows[:limit]]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return CheckpointPage(data=page, has_more=len(rows) > limit, first_id=first, last_id=last)


def _place(after: str | None) -> int | None:
    """Return the number in the id of an event or a checkpoint; the route has validated the id."""
    return None if after is None else int(after.rpartition("-")[2])


def _refused(pointer: str, detail: str) -> Invalid:
    return Invalid("invalid_request", f"{pointer}: {detail}", [Flaw(pointer=pointer, detail=detail)])


def _shown_job(record: JobRecord) -> FineTuningJob:
    """Convert the record of a fine-tuning job to OpenAI's format."""
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


def _shown_event(seq: int, row: Row) -> Event:
    """Convert a row of the job's events to OpenAI's format."""
    return Event(
        id=f"ftevent-{seq}",
        created_at=int(row["time"]),
        level=_EVENT_LEVELS.get(row["level"], "info"),
        message=row["message"],
        data={"type": row["type"], **(row.get("data") or {})},
    )


def _shown_checkpoint(job: str, row: Row) -> Checkpoint:
    """Convert a row of the job's checkpoints to OpenAI's format."""
    number = row["number"]
    return Checkpoint(
        id=f"ftckpt-{number}",
        created_at=int(row["time"]),
        fine_tuning_job_id=job,
        fine_tuned_model_checkpoint=f"job:{job}@{number}",
        step_number=number,
        metrics={"step": float(number)},
    )
