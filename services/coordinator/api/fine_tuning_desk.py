"""Fine-tuning as the HTTP API uses it. Implemented in ``finetuning.desk``."""

from __future__ import annotations

from typing import Protocol

from penstock.services.coordinator.api.fine_tuning_models import (
    CheckpointPage,
    EventPage,
    FineTuningJob,
    FineTuningRequest,
    JobPage,
)
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["FineTuning"]


class FineTuning(Protocol):
    """Jobs that came from fine-tuning requests; every method that takes one raises NotFound for any other."""

    async def create(self, wanted: FineTuningRequest, *, key: str) -> FineTuningJob:
        """Submit a job.

        Raises:
            HttpProblem: 422, with pointers into the request, or into its files by line.
            ConfigError: it cannot run here.
        """
        ...

    async def get(self, job: str) -> JobRecord:
        """The record of a job. Raises NotFound."""
        ...

    def shown(self, record: JobRecord) -> FineTuningJob:
        """A record as OpenAI's clients read it."""
        ...

    async def page(
        self, *, after: str | None, limit: int, labels: dict[str, str], models: frozenset[str] | None
    ) -> JobPage:
        """Newest first; ``labels`` of the metadata, ``models`` as of ``Control.list_jobs``."""
        ...

    async def events(self, job: str, *, after: str | None, limit: int) -> EventPage:
        """Newest first."""
        ...

    async def checkpoints(self, job: str, *, after: str | None, limit: int) -> CheckpointPage:
        """Newest first."""
        ...
