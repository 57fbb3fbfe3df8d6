"""Follow the job records: one task for every job that is not terminal. Used by every worker service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from penstock.shared.config.evaluation_job import EvaluationJob
from penstock.shared.config.job import JobConfig
from penstock.shared.config.kinds import parse_job
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord
from penstock.shared.runtime.tasks import unexpected
from penstock.shared.transport.bus import Bus

__all__ = ["watch_jobs"]

logger = logging.getLogger(__name__)

RESTART_S = 1.0

Opening = Callable[[], Awaitable[None]]


async def watch_jobs(
    bus: Bus,
    open_session: Callable[[str, JobConfig], Awaitable[None]],
    *,
    open_evaluation: Callable[[str, EvaluationJob], Awaitable[None]] | None = None,
    on_end: Callable[[str], None] = lambda job: None,
) -> None:
    """Run ``open_session(job, config)`` for each running job until the job ends; again if it breaks. Until cancelled.

    Evaluation jobs go to ``open_evaluation``; a service without one has no part in them.

    ``on_end(job)`` is called when a job is over and its session, if there was one, is closed; also for jobs that ended
    while this process was not there, so it must be safe to repeat.
    """
    tasks: dict[str, asyncio.Task[None]] = {}
    try:
        async for entry in bus.kv(subjects.JOBS).watch(""):
            if entry.value is None:
                continue
            try:
                record = JobRecord.model_validate_json(entry.value)
                config = parse_job(record.spec)
            except (ValueError, ConfigError) as error:
                logger.error("job record '%s' is unreadable: %s", entry.key, error)
                continue
            if record.status.phase in TERMINAL_PHASES:
                task = tasks.pop(record.id, None)
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                on_end(record.id)
            elif record.id not in tasks:  # a session that returned by itself was drained: it stays closed
                if isinstance(config, JobConfig):
                    opening: Opening | None = partial(open_session, record.id, config)
                else:
                    opening = open_evaluation and partial(open_evaluation, record.id, config)
                if opening is not None:
                    tasks[record.id] = asyncio.create_task(_keep_open(record.id, opening))
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _keep_open(job: str, open_session: Opening) -> None:
    while True:
        error = await unexpected(open_session())
        if error is None:
            return
        logger.error("session of job %s broke; opening it again in %g s", job, RESTART_S, exc_info=error)
        error = None  # its traceback holds whatever the session held
        await asyncio.sleep(RESTART_S)
