"""The trainer process: a session for every job that runs, and replays on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any

import torch

from penstock.services.trainer.session import TrainerSession
from penstock.shared.config.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Ack, ReplayRequest
from penstock.shared.runtime.jobs import watch_jobs
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import cleanup

__all__ = ["TrainerService"]

logger = logging.getLogger(__name__)


class TrainerService:
    """Opens and closes sessions as jobs come and go."""

    name = "trainer"

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self.bus, self.settings = bus, settings
        self.sessions: dict[str, TrainerSession] = {}
        self.ready = False
        self._replays: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until drained or cancelled."""
        await self.bus.serve(subjects.REPLAY, self._on_replay, queue="trainer")
        self.ready = True
        await watch_jobs(self.bus, self._run_session, on_end=lambda job: cleanup(job, self.settings))

    async def _run_session(self, job: str, config: JobConfig) -> None:
        torch.set_num_threads(config.placement.trainer_threads)
        session = TrainerSession(self.bus, self.settings, job, config)
        self.sessions[job] = session
        try:
            await session.run()
        finally:
            self.sessions.pop(job, None)

    async def drain(self) -> None:
        """Stop every session at its next step boundary."""
        self.ready = False
        for session in list(self.sessions.values()):
            session.drain()
        while self.sessions:
            await asyncio.sleep(0.05)

    def status(self) -> dict[str, dict[str, Any]]:
        """Per job."""
        return {job: session.status() for job, session in self.sessions.items()}

    async def _on_replay(self, data: bytes) -> bytes:
        """Start a replay in a process of its own: it needs the thread count of its job, not of ours."""
        request, envelope = unpack(data, ReplayRequest)
        bounds = [str(bound) if bound is not None else "" for bound in (request.from_batch, request.to_batch)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.services.trainer.replay", envelope.job, request.id, *bounds
        )
        task = asyncio.create_task(self._reap(process))
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)
        return pack(Ack(ok=True), job=envelope.job)

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        try:
            code = await process.wait()
            logger.info("replay ended with %d", code)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
