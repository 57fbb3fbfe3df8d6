"""The rollout process: runs a session for every job."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import torch

from penstock.services.rollout import trial
from penstock.services.rollout.embodied.films import FilmMaker
from penstock.services.rollout.embodied.session import EmbodiedSession
from penstock.services.rollout.session import RolloutSession, ServingSession
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import AnyJob, TextJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.trials import TrialRequest
from penstock.shared.runtime.jobs import Breaks, watch_jobs
from penstock.shared.runtime.user_process import run_trial
from penstock.shared.transport.bus import Bus

__all__ = ["RolloutService"]

logger = logging.getLogger(__name__)

QUEUE = "rollout"
MAX_TRIALS = 2
"""Maximum number of trials of user code at the same time; each runs in a process of its own."""


class RolloutService:
    """Opens and closes sessions as jobs start and end."""

    name = "rollout"

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self.bus, self.settings = bus, settings
        self.sessions: dict[str, RolloutSession | EmbodiedSession | ServingSession] = {}
        self.ready = False
        self._breaks = Breaks()
        self._films = FilmMaker(bus, settings)

    async def run(self) -> None:
        """Serve until drained or cancelled."""
        trials = await self.bus.serve(subjects.ROLLOUT_TRY, self._on_try, queue=QUEUE, max_concurrent=MAX_TRIALS)
        self.ready = True
        async with trials, asyncio.TaskGroup() as tasks:
            films = tasks.create_task(self._films.run())
            await watch_jobs(
                self.bus, self._run_session, open_evaluation=self._run_session, open_embodied=self._run_embodied,
                open_serving=self._run_serving, amend=self._amend, breaks=self._breaks,
            )  # fmt: skip
            films.cancel()

    async def _on_try(self, data: bytes) -> bytes:
        """Run a trial of user code in its own process, and return the encoded ``TrialReply``."""
        request, envelope = unpack(data, TrialRequest)
        return pack(await run_trial(trial.MODULE, request), job=envelope.job, id=envelope.id, trace=envelope.trace)

    async def _run_session(self, job: str, config: TextJob) -> None:
        await self._keep(RolloutSession(self.bus, self.settings, job, config))

    async def _run_embodied(self, job: str, config: EmbodiedJob) -> None:
        await self._keep(EmbodiedSession(self.bus, self.settings, job, config, self._films))

    async def _run_serving(self, job: str, config: ServingJob) -> None:
        await self._keep(ServingSession(self.bus, self.settings, job, config))

    async def _keep(self, session: RolloutSession | EmbodiedSession | ServingSession) -> None:
        torch.set_num_threads(session.config.placement.rollout_threads)
        self.sessions[session.job] = session
        try:
            await session.run()
        finally:
            self.sessions.pop(session.job, None)

    def _amend(self, job: str, config: AnyJob) -> None:
        match self.sessions.get(job):
            case RolloutSession() as session if not isinstance(config, EmbodiedJob | ServingJob):
                session.amend(config)
            case EmbodiedSession() as session if isinstance(config, EmbodiedJob):
                session.amend(config)

    async def drain(self) -> None:
        """Finish the tickets and requests in progress; take no new ones."""
        self.ready = False
        for session in self.sessions.values():
            session.drain()
        while any(session.busy for session in self.sessions.values()):
            await asyncio.sleep(0.05)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the heartbeat entries by job."""
        return self._breaks.add_to({job: session.status() for job, session in self.sessions.items()})
