"""Serves checkpoints on request: a chat with ``model: job:NAME@final`` deploys that checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.services.coordinator.jobs.job_index import JobEntry
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.origins import Origins
from penstock.services.coordinator.submission import Submissions
from penstock.services.coordinator.training.checkpoints import COMMIT
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import OutOfReach, ProtocolError, RetryLater
from penstock.shared.protocol.jobs import ModelOrigin

__all__ = ["Deployments"]

BY_REQUEST = {"deployed": "on request"}
"""Label of a deployment that a chat request started."""
LISTED = 100
"""Number of the newest finished jobs that are searched for models to serve on request."""
FULL_RETRY_S = 30


@dataclass(frozen=True, slots=True)
class Servable:
    """A model that can be served on request: the final checkpoint of a job. ``ended`` is in Unix seconds."""

    id: str
    name: str
    job: str
    ended: int
    version: int


class Deployments:
    """Deploys checkpoints of jobs as models. Every method may raise Unavailable."""

    def __init__(self, store: JobStore, origins: Origins, submissions: Submissions, settings: ServiceSettings) -> None:
        self._store, self._origins, self._submissions, self._settings = store, origins, submissions, settings

    async def find(self, reference: str) -> ModelOrigin:
        """Return the checkpoint that ``reference`` names in the form `job:NAME@WHICH`. Raises NotFound, or ConfigError
        if the reference is malformed."""
        return (await self._origins.find(reference))[0]

    async def deploy(self, origin: ModelOrigin) -> str:
        """Deploy the checkpoint unless it is served already; return the id of the deployment.

        Raises:
            ConfigError: the checkpoint cannot be served here.
            OutOfReach: deployment on request is off.
            RetryLater: as many checkpoints as allowed are deployed.
        """
        index = await self._store.index()
        unfinished = index.unfinished()
        running = [job.id for job in unfinished if _serves(job, origin)]
        if running:
            return running[-1]
        self._check_room(unfinished)
        name = f"{origin.name[:40]}-{origin.number}-{origin.job[-8:]}"
        spec = {
            "kind": "serving", "name": name, "model": {"path": origin.checkpoint}, "metadata": BY_REQUEST,
            "serving": {"idle_s": self._settings.deploy_idle_s},
        }  # fmt: skip
        # The key counts earlier deployments, so concurrent requests, here or at another replica, get the same job.
        key = f"deploy\n{origin.checkpoint}\n{sum(_serves(job, origin) for job in index.all())}"
        raw: dict[str, Any] = {"checkpoint": origin.checkpoint}
        return (await self._submissions.submit(ServingJob.parse(spec), raw, key=key)).id

    def _check_room(self, unfinished: Iterable[JobEntry]) -> None:
        most = self._settings.deploy_most
        running = [job.name for job in unfinished if BY_REQUEST.items() <= job.labels.items()]
        if not most:
            text = "this deployment serves checkpoints only by 'penstock serve' (PENSTOCK_DEPLOY_MOST is 0)"
            raise OutOfReach("model_not_found", text)
        if len(running) >= most:
            text = (
                f"{len(running)} checkpoints are served on request already ({', '.join(running)}), which is as many as "
                f"PENSTOCK_DEPLOY_MOST allows; one is given back {self._settings.deploy_idle_s:g} s after its last "
                "request, or by 'penstock cancel'"
            )
            raise RetryLater("deployments_full", text, retry_after_s=FULL_RETRY_S)

    async def servable(self, models: frozenset[str] | None) -> list[Servable]:
        """Of the newest finished jobs (at most LISTED), return the models that ``deploy`` accepts, oldest first.

        ``models``: names or ids of the jobs to search; None: all jobs.
        """
        if not self._settings.deploy_most:
            return []
        entries = (await self._store.index()).of_models(models)
        finished = [job for job in entries if job.finished and job.kind in ("rl", "online_rl")][-LISTED:]
        return await asyncio.to_thread(_with_final, finished)


def _serves(job: JobEntry, origin: ModelOrigin) -> bool:
    return job.kind == "serving" and job.origin == origin.checkpoint


def _with_final(entries: Iterable[JobEntry]) -> list[Servable]:
    """Return a model for each job of ``entries`` whose final checkpoint is on this host."""
    found = []
    for entry in entries:
        try:
            record = entry.record()
        except ProtocolError:  # written by another release
            continue
        path, end = record.status.checkpoint, record.status.finished_at or record.created_at
        if path is not None and (Path(path) / COMMIT).is_file():
            version = record.status.policy_version
            found.append(Servable(f"job:{entry.id}@final", entry.name, entry.id, int(end.timestamp()), version))
    return found
