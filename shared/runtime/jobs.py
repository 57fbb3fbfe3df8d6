"""Watches the job records and runs one session (a task) per non-terminal job. Used by every worker service."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.evaluation_job import EvaluationJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyJob, parse_job
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord
from penstock.shared.protocol.trace import tracing
from penstock.shared.runtime.logs import bound
from penstock.shared.runtime.tasks import end_tasks, first_error, unexpected
from penstock.shared.transport.bus import Bus

__all__ = ["Breaks", "release_memory", "watch_jobs"]

logger = logging.getLogger(__name__)

RESTART_S = 1.0
AGAIN_S = 30.0
"""Delay (seconds) after which memory is released a second time after a job. By then most threads that still computed
for the job have ended."""


LONGEST_DOUBT_S = 300.0
"""Longest time (seconds) that ``Breaks`` goes on reporting why a session broke, once the session has restarted."""


class _Status(msgspec.Struct, frozen=True):
    phase: str = "pending"


class _Stored(msgspec.Struct, frozen=True):
    """Phase of a stored job record. Only this part is decoded first: most jobs of an old deployment have ended, and the
    rest of their records is not needed."""

    status: _Status = _Status()


_decoder = msgspec.json.Decoder(_Stored)

Open = Callable[[str, JobConfig], Awaitable[None]]
OpenEvaluation = Callable[[str, EvaluationJob], Awaitable[None]]
OpenEmbodied = Callable[[str, EmbodiedJob], Awaitable[None]]
OpenServing = Callable[[str, ServingJob], Awaitable[None]]


class Breaks:
    """Reasons why sessions of this process failed, by job, for the heartbeats of the process.

    A reason is reported until the next session has lasted a while longer than the broken one. Before that, the next
    session may still break for the same reason, for example if an engine takes minutes to fail.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, tuple[float, str, float]] = {}

    def note(self, job: str, error: BaseException, lasted_s: float) -> None:
        """Record the error that ended a session of a job after ``lasted_s``."""
        cause = first_error(error)
        text, since, now = str(cause) or repr(cause), bus_time(), time.monotonic()
        if job in self._reasons and (self._reasons[job][1] == text or now < self._reasons[job][2]):
            since = self._reasons[job][0]
        end = now + 2 * RESTART_S + min(1.5 * lasted_s, LONGEST_DOUBT_S)
        self._reasons[job] = since, text, end

    def forget(self, job: str) -> None:
        """Drop the reason of a job that has ended."""
        self._reasons.pop(job, None)

    def add_to(self, rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Add each job's failure to the heartbeat entries ``rows``, as ``problem`` and ``problem_since`` (Unix
        seconds); return ``rows``."""
        now = time.monotonic()
        for job, (since, text, end) in self._reasons.items():
            if now < end:
                rows.setdefault(job, {}).update(problem=text, problem_since=since)
        return rows


async def watch_jobs(
    bus: Bus,
    open_session: Open,
    *,
    open_evaluation: OpenEvaluation | None = None,
    open_embodied: OpenEmbodied | None = None,
    open_serving: OpenServing | None = None,
    amend: Callable[[str, AnyJob], None] = lambda job, config: None,
    on_end: Callable[[str], None] = lambda job: None,
    breaks: Breaks | None = None,
) -> None:
    """Run ``open_session(job, config)`` for each running job until the job ends, with restarts after failures. Runs
    until cancelled.

    Evaluation jobs use ``open_evaluation``, embodied ones ``open_embodied``, deployments ``open_serving``; a service
    without one ignores such jobs. ``amend(job, config)`` is called when the job file changed; a restarted session gets
    the newest job file.

    ``on_end(job)`` is called when a job has ended and its session, if any, is closed. It is also called for jobs that
    ended or were deleted while this process was not running, so it must be idempotent.

    ``breaks`` records why sessions failed.
    """
    breaks = breaks or Breaks()
    sessions = _Sessions(open_session, open_evaluation, open_embodied, open_serving, amend=amend, breaks=breaks)
    watch = bus.kv(subjects.JOBS).watch("")
    try:
        async for entry in watch:
            if entry.value is None:  # deleted; its end may not have been observed here
                await sessions.end(entry.key)
                on_end(entry.key)
                continue
            try:
                if _decoder.decode(entry.value).status.phase in TERMINAL_PHASES:
                    await sessions.end(entry.key)
                    on_end(entry.key)
                    continue
                record = JobRecord.model_validate_json(entry.value)
                config = parse_job(record.spec)
            except (ValueError, ConfigError) as error:
                logger.error("job record '%s' is unreadable: %s", entry.key, error)
            else:
                with bound(job=record.id), tracing(record.trace):
                    sessions.follow(record.id, config)
    finally:
        await sessions.close()
        await watch.aclose()


async def release_memory(after_s: float = 0.0) -> None:
    """Release the memory that a job left behind in this process, after a wait of ``after_s`` seconds.

    Sessions, engines and their tensors refer to each other, so that only a full collection frees them, and with them
    the weight slots that they map; without new allocations, no collection may run for hours. After it, the C library
    keeps the freed tensors of up to 32 MiB each: ``malloc_trim`` returns their pages to the system.
    """
    await asyncio.sleep(after_s)
    gc.collect()  # not in a thread: finalizers use objects of this loop
    await asyncio.to_thread(_trim)


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):  # a different C library
        ctypes.CDLL(None).malloc_trim(0)


class _Sessions:
    """Open sessions of this process, and the current job file of each job."""

    def __init__(
        self,
        open_session: Open,
        open_evaluation: OpenEvaluation | None,
        open_embodied: OpenEmbodied | None,
        open_serving: OpenServing | None,
        *,
        amend: Callable[[str, AnyJob], None],
        breaks: Breaks,
    ) -> None:
        self._open_session, self._open_evaluation, self._open_embodied = open_session, open_evaluation, open_embodied
        self._open_serving, self._amend, self._breaks = open_serving, amend, breaks
        self._configs: dict[str, AnyJob] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._releasing: asyncio.Task[None] | None = None

    def follow(self, job: str, config: AnyJob) -> None:
        """Handle the record of a running job: open its session if it has none, and call ``amend`` if the job file
        changed."""
        before, self._configs[job] = self._configs.get(job), config
        if before is not None and before != config:
            self._amend(job, config)
        # A session that returned by itself was drained: it stays closed.
        if self._opener(job, config) is not None and job not in self._tasks:
            self._tasks[job] = asyncio.create_task(_keep_open(job, partial(self._open, job), self._breaks))

    async def end(self, job: str) -> None:
        """Close the session of a job that has ended, and release its memory."""
        if job in self._tasks:
            await end_tasks(
                [self._tasks[job]]
            )  # kept in _tasks until it has ended: if this call is cancelled, `close` waits for it
            del self._tasks[job]
            await release_memory()
            if self._releasing is not None:
                self._releasing.cancel()
            self._releasing = asyncio.create_task(release_memory(AGAIN_S))
        self._configs.pop(job, None)
        self._breaks.forget(job)

    async def close(self) -> None:
        """Close all sessions."""
        await end_tasks([*self._tasks.values(), *([] if self._releasing is None else [self._releasing])])

    async def _open(self, job: str) -> None:
        opener = self._opener(job, self._configs[job])
        assert opener is not None, "followed"
        await opener()

    def _opener(self, job: str, config: AnyJob) -> Callable[[], Awaitable[None]] | None:
        """Return the function that opens the session of a job; None if this service ignores jobs of this kind."""
        match config:
            case JobConfig():
                return partial(self._open_session, job, config)
            case EvaluationJob():
                return None if self._open_evaluation is None else partial(self._open_evaluation, job, config)
            case EmbodiedJob():
                return None if self._open_embodied is None else partial(self._open_embodied, job, config)
            case ServingJob():
                return None if self._open_serving is None else partial(self._open_serving, job, config)


async def _keep_open(job: str, open_session: Callable[[], Awaitable[None]], breaks: Breaks) -> None:
    logger.info("working for job %s", job)
    while True:
        start = time.monotonic()
        error = await unexpected(open_session())
        if error is None:
            return
        logger.error("session of job %s broke; opening it again in %g s", job, RESTART_S, exc_info=error)
        breaks.note(job, error, time.monotonic() - start)
        error = None  # its traceback references all objects of the session
        await release_memory()
        await asyncio.sleep(RESTART_S)
