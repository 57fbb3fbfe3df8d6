"""Finds the online job to which an item of feedback belongs: by the job mark at the end of its target's id
(``job_mark``), by the job's name, or because only one online job runs."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

from penstock.services.coordinator.jobs.job_index import JobEntry
from penstock.services.coordinator.jobs.store import JobStore
from penstock.shared.config.online.section import RESERVED_METRICS, REWARD, MetricConfig, OnlineConfig
from penstock.shared.data.redaction import Redactor
from penstock.shared.errors import ConfigError, Flaw, Gone, Invalid, ProtocolError, Unavailable
from penstock.shared.protocol.jobs import TERMINAL_PHASES

__all__ = ["LiveJob", "LiveJobs", "no_job"]

log = logging.getLogger(__name__)

ONLINE = "online_rl"
LOOK_AGAIN_S = 1.0
"""Minimum time between reads of the `jobs` bucket for an unknown job, which may be a new one (seconds)."""
RETRY_S = 1.0
MARK_DIGITS = 8
"""Number of hex digits at the end of a canonical id that are the job mark (``job_mark``)."""


@dataclass(frozen=True, slots=True)
class LiveJob:
    """Part of an online job's record that is needed to process feedback for the job."""

    id: str
    name: str
    finished: bool
    online: OnlineConfig
    redactor: Redactor | None = None
    """Redacts texts before they are stored; None: texts are stored as they are."""
    finished_at: float | None = None
    """End of the job (Unix seconds); None while it runs."""

    @property
    def names(self) -> list[str]:
        """Names of the metrics that may be posted."""
        return sorted({*self.online.metrics, REWARD, *RESERVED_METRICS})

    def metric(self, name: str) -> MetricConfig | None:
        """Return the declaration of a numeric or boolean metric, or None if there is none of this name."""
        return self.online.metric(name)


class _Other(NamedTuple):
    """A job of another kind: it may serve requests, but does not learn from feedback."""

    id: str
    name: str
    kind: str

    def refusal(self, pointer: str, target: str) -> Invalid:
        """Build the error that refuses feedback for this job; ``target`` is how the request named the job."""
        text = f"{target} job '{self.name}' ({self.id}), which is of kind {self.kind} and learns nothing from feedback"
        detail = f"{text}: only jobs of kind {ONLINE} do"
        return Invalid("not_online", detail, [Flaw(pointer=pointer, detail=detail)])


class LiveJobs:
    """Caches the online jobs and the names of all other jobs. ``run`` keeps this cache up to date from the `jobs`
    bucket."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._jobs: dict[str, LiveJob] = {}
        self._marks: dict[int, LiveJob] = {}
        self._others: dict[int, _Other] = {}
        self._looked = -LOOK_AGAIN_S

    async def run(self) -> None:
        """Follow the `jobs` bucket until cancelled, and keep the known jobs up to date."""
        while True:
            try:
                async for job in self._store.watch():
                    self.know(job)
            except Unavailable as error:
                log.info("jobs are not followed: %s", error)
            await asyncio.sleep(RETRY_S)

    def know(self, entry: JobEntry) -> None:
        """Add or update a job from its record."""
        if entry.kind != ONLINE:
            self._others[entry.mark] = _Other(entry.id, entry.name, entry.kind)
            return
        try:
            record = entry.record()
            online = OnlineConfig.parse(record.spec.get("online", {}), where=record.id)
        except (ConfigError, ProtocolError) as error:
            log.error("feedback for job %s cannot be taken: %s", entry.id, error)
            return
        finished = record.status.phase in TERMINAL_PHASES
        redactor = Redactor(online.redaction) if online.redaction is not None else None
        ended = record.status.finished_at.timestamp() if finished and record.status.finished_at is not None else None
        job = LiveJob(record.id, record.name, finished, online, redactor, ended)
        self._jobs[job.id] = self._marks[entry.mark] = job

    def get(self, job: str) -> LiveJob | None:
        """Return the online job with the id ``job``, or None if there is none."""
        return self._jobs.get(job)

    def was_over(self, job: str, time: float) -> bool:
        """Return True if a job had ended by ``time`` (Unix seconds). No leader decides on an item that arrives after
        the end of its job."""
        known = self._jobs.get(job)
        return known is not None and known.finished_at is not None and time >= known.finished_at

    def of_mark(self, mark: int) -> str | None:
        """Return the id of the online job, running or finished, whose interactions and episodes have ids that end in
        ``mark``. Return None if there is no such job."""
        job = self._marks.get(mark)
        return job.id if job is not None else None

    async def of_target(self, target: str, pointer: str) -> LiveJob:
        """Return the online job whose mark is at the end of ``target``, the canonical id of an interaction or episode.

        If no known job has this mark, return the only running online job.

        Raises:
            Gone: the job has ended.
            Invalid: the job is of another kind, or no known job has this mark and not exactly one online job runs.
        """
        mark = int(target[-MARK_DIGITS:], 16)
        if mark not in self._marks and mark not in self._others:
            await self._refresh()
        job = self._marks.get(mark)
        if job is not None:
            return _open(job)
        if mark in self._others:
            raise self._others[mark].refusal(pointer, f"'{target}' is of")
        running = [job for job in self._jobs.values() if not job.finished]
        if len(running) == 1:
            return running[0]
        raise no_job(pointer, f"'{target}' was not given out by an online job that is known here")

    async def of_model(self, model: str) -> LiveJob:
        """Return the online job with this name or id, with or without `@VERSION`.

        Raises:
            Gone: the job has ended.
            Invalid: there is none.
        """
        name = model.partition("@")[0]
        job = self._named(name)
        if job is None:
            await self._refresh()
            job = self._named(name)
        if job is None:
            others = [other for other in self._others.values() if name in (other.id, other.name)]
            if others:
                raise max(others).refusal("/model", "this is")
            raise no_job("/model", f"no online job '{name[:128]}'")
        return _open(job)

    def _named(self, name: str) -> LiveJob | None:
        if name in self._jobs:
            return self._jobs[name]
        found = [job for job in self._jobs.values() if job.name == name]
        return max(found, key=lambda job: (not job.finished, job.id), default=None)

    async def _refresh(self) -> None:
        if time.monotonic() - self._looked < LOOK_AGAIN_S:
            return
        self._looked = time.monotonic()
        for entry in (await self._store.index()).all():
            known = self._jobs.get(entry.id)
            if known is None or known.finished != entry.finished:
                self.know(entry)


def _open(job: LiveJob) -> LiveJob:
    if job.finished:
        raise Gone("job_finished", f"online job '{job.name}' ({job.id}) is over: it learns no more")
    return job


def no_job(pointer: str, detail: str) -> Invalid:
    """Return the refusal of feedback whose job is unknown. Lists no job names, as they may belong to other users."""
    text = f"{detail}; GET /v1/models lists the models that this key reaches"
    return Invalid("no_such_target", text, [Flaw(pointer=pointer, detail=text)])
