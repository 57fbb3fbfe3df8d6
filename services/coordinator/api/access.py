"""Dependencies of the routes: the services, the stop signal, and validated job ids."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Query, Request

from penstock.services.coordinator.api.feeds import Feeds
from penstock.services.coordinator.api.http.occupancy import Occupancy
from penstock.services.coordinator.api.http.ratelimit import RateLimiter
from penstock.services.coordinator.api.http.volatile import Volatile
from penstock.services.coordinator.auth import KeyRing
from penstock.services.coordinator.feedback.service import FeedbackService
from penstock.services.coordinator.services import Services
from penstock.services.coordinator.serving.gateway import Gateway
from penstock.shared.errors import NotFound

__all__ = ["Backend", "BackendDep", "JobId", "SomeJob", "known_job_id"]

_JOB_ID = re.compile(r"job_[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Backend(Services):
    """State that all routes of one app share: the coordinator's services, and the helpers that only HTTP needs."""

    stopping: asyncio.Event
    volatile: Volatile
    ring: KeyRing
    limiter: RateLimiter
    occupancy: Occupancy
    feeds: Feeds
    feedback: FeedbackService | None
    serving: Gateway | None


async def _backend(request: Request) -> Backend:
    backend: Backend = request.app.state.backend
    return backend


async def _job_id(job_id: Annotated[str, Path(description="Id of a job: job_ and 32 hex digits")]) -> str:
    return known_job_id(job_id)


async def _some_job(
    job: Annotated[str, Query(max_length=64, description="Only entries of this job (id)")] = "",
) -> str:
    return known_job_id(job) if job else ""


def known_job_id(job: str) -> str:
    """Return ``job`` if it has the form of a job id, which makes it a safe NATS subject token; else raise NotFound."""
    if not _JOB_ID.fullmatch(job):
        raise NotFound(f"'{job[:80]}' is not the id of a job (job_ and 32 hex digits)")
    return job


BackendDep = Annotated[Backend, Depends(_backend)]
JobId = Annotated[str, Depends(_job_id)]
SomeJob = Annotated[str, Depends(_some_job)]
"""Id of a job from the query; '' stands for all jobs."""
