"""The trainer process. Rank 0 runs a session for each job, and replays jobs on request; the other ranks carry out rank
0's orders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from functools import partial
from typing import Any

import torch

from penstock.services.trainer.follower import Follower
from penstock.services.trainer.ranks.heartbeats import Ranks, meet
from penstock.services.trainer.ranks.orders import Leave, Orders
from penstock.services.trainer.ranks.process_group import place_from_environment
from penstock.services.trainer.session import TrainerSession
from penstock.shared.config.jobs.kinds import AnyJob, AnyTraining
from penstock.shared.config.service import CHECKPOINTS, ServiceSettings
from penstock.shared.errors import RankLost
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Ack, ReplayRequest
from penstock.shared.runtime.jobs import Breaks, watch_jobs
from penstock.shared.runtime.service import EXIT_FAILED
from penstock.shared.runtime.tasks import Background, end_tasks, first_error, unexpected
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import cleanup

__all__ = ["TrainerService"]

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Time that followers have to take the ``Leave`` order."""
END_S = 2.0
"""Time that a process whose ranks are lost has to shut down cleanly."""


class TrainerService:
    """Opens and closes sessions as jobs start and end. On a rank above 0, only runs the follower."""

    name = "trainer"

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self.bus, self.settings = bus, settings
        self.sessions: dict[str, TrainerSession] = {}
        self.ready = False
        self._breaks = Breaks()
        self._place = place_from_environment()
        self._ranks: Ranks | None = None
        self._meeting = asyncio.Lock()
        self._follower: Follower | None = None
        self._ended = asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._replays: set[asyncio.Task[None]] = set()
        self._files: dict[str, AnyTraining] = {}
        """Newest config of each job that runs here."""

    async def run(self) -> None:
        """Serve until drained or cancelled.

        Raises:
            RankLost: another rank of this trainer is lost, so all of them must be restarted. With several ranks, every
            error that ends a session has the same effect.
        """
        try:
            if self._place.size > 1:
                await self._meet()
            if self._place.rank:
                await self._follow()
            else:
                await self._lead()
        finally:
            self._ended.set()

    async def _lead(self) -> None:
        await self.bus.serve(subjects.REPLAY, self._on_replay, queue="trainer")
        self.ready = True
        jobs = watch_jobs(
            self.bus, self._run_sessions, open_embodied=self._run_sessions, amend=self._amend, on_end=self._cleanup,
            breaks=self._breaks,
        )  # fmt: skip
        watching = asyncio.create_task(jobs, name="jobs")
        guarding = asyncio.create_task(self._guard(), name="liveness")
        try:
            await asyncio.wait({watching, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                self._lost.result()
            await watching
        finally:
            await end_tasks([watching, guarding])

    async def _guard(self) -> None:
        """Watch the liveness of the ranks and end the process if one is lost."""
        liveness = None if self._ranks is None else self._ranks.liveness
        if liveness is not None and (error := await unexpected(liveness.run())) is not None:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """End this process, because the ranks cannot continue together."""
        logger.error("ending, for the ranks of this trainer to start over: %s", first_error(error))
        _end_soon()
        if not self._lost.done():
            self._lost.set_exception(error)

    def _cleanup(self, job: str) -> None:
        for name in (job, subjects.base_manifest(job)):
            cleanup(name, self.settings)

    async def _follow(self) -> None:
        ranks = await self._meet()
        self._follower = Follower(self.bus, ranks, self.settings.data_dir / CHECKPOINTS)
        self.ready = True
        if (error := await unexpected(_follow(self._follower, ranks))) is not None:
            logger.error("ending, for the ranks of this trainer to start over: %s", first_error(error))
            _end_soon()
            raise error

    async def _meet(self) -> Ranks:
        """Join the ranks of this trainer at the first call, and return this process's ``Ranks``.

        A single process becomes rank 0 of 1 when a job's backend needs ranks.
        """
        async with self._meeting:
            if self._ranks is None:
                logger.info("meeting the %d ranks of this trainer as rank %d", self._place.size, self._place.rank)
                settings = self.settings
                self._ranks = await meet(
                    self._place, deadline_s=settings.rank_deadline_s, silence_s=settings.rank_silence_s,
                    interval_s=settings.heartbeat_s,
                )  # fmt: skip
        return self._ranks

    def _amend(self, job: str, config: AnyJob) -> None:
        """Store a job's new config. If its backend changed, ask its session to end at the next step boundary."""
        if not isinstance(config, AnyTraining):
            return
        self._files[job] = config
        session = self.sessions.get(job)
        if session is not None and config.backend != session.config.backend:
            session.leave(f"to go on with backend '{config.backend.type}'")

    async def _run_sessions(self, job: str, config: AnyTraining) -> None:
        """Run the job's sessions one after another: a new one each time the backend changes."""
        self._files[job] = config
        try:
            while await self._run_session(job) and self.ready:
                pass
        finally:
            del self._files[job]

    async def _run_session(self, job: str) -> bool:
        """Run one session. Return True if it ended because the job changes its backend."""
        torch.set_num_threads(self._files[job].placement.trainer_threads)
        if self._files[job].backend.type != "local":
            await self._meet()
        config = self._files[job]  # it may have changed during ``_meet``
        ranks = self._ranks if config.backend.type != "local" else None
        session = TrainerSession(self.bus, self.settings, job, config, ranks)
        self.sessions[job] = session
        try:
            error = await unexpected(session.run())
        finally:  # also when the job ended before the session did
            self.sessions.pop(job, None)
            if ranks is not None and ranks.stranded:
                self._lose(RankLost(ranks.stranded))
        if error is not None and ranks is not None and ranks.place.size > 1:
            # The other ranks may be anywhere in their orders: only a restart of all processes synchronizes them.
            if ranks.liveness is not None:
                logger.error("job %s cannot go on: %s", job, ranks.liveness.describe())
            self._lose(error)
            await asyncio.Event().wait()  # until the process ends
        if error is not None:
            raise error
        return session.leaves

    async def drain(self) -> None:
        """Stop every session at its next step boundary, then dismiss the followers.

        On a rank above 0, wait until rank 0 has dismissed this follower.
        """
        self.ready = False
        if self._place.rank:
            await self._ended.wait()
            return
        for session in list(self.sessions.values()):
            session.drain()
        while self.sessions:
            await asyncio.sleep(0.05)
        if self._ranks is not None and self._place.size > 1:
            with contextlib.suppress(RankLost):
                await self._ranks.threads.compute(partial(_dismiss, self._ranks.orders))

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the heartbeat entries by job."""
        if self._follower is not None:
            return self._follower.status()
        return self._breaks.add_to({job: session.status() for job, session in self.sessions.items()})

    async def _on_replay(self, data: bytes) -> bytes:
        """Start a replay in a process of its own: in it, torch must use the thread count of the replayed job, which may
        differ from that of the job that trains here."""
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


def _dismiss(orders: Orders) -> None:
    orders.give(Leave())
    orders.wait_until_taken(LEAVE_S)


async def _follow(follower: Follower, ranks: Ranks) -> None:
    async with Background() as background:
        if ranks.liveness is not None:
            background.spawn(ranks.liveness.run(), name="liveness")
        await follower.run()


def _end_soon() -> None:
    """Exit forcibly after ``END_S``: a thread that waits for a lost rank cannot be stopped and would delay the exit."""
    timer = threading.Timer(END_S, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()
