"""The trainer process: a session for every job that runs, and replays on request; or a rank that follows another."""

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
from penstock.shared.runtime.jobs import watch_jobs
from penstock.shared.runtime.service import EXIT_FAILED
from penstock.shared.runtime.tasks import Background, end_tasks, unexpected
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import cleanup

__all__ = ["TrainerService"]

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Followers have this long to hear that it is over."""
END_S = 2.0
"""A process whose ranks are lost has this long to tidy up."""


class TrainerService:
    """Opens and closes sessions as jobs come and go. On a rank above 0 it only follows."""

    name = "trainer"

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self.bus, self.settings = bus, settings
        self.sessions: dict[str, TrainerSession] = {}
        self.ready = False
        self._place = place_from_environment()
        self._ranks: Ranks | None = None
        self._meeting = asyncio.Lock()
        self._follower: Follower | None = None
        self._ended = asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._replays: set[asyncio.Task[None]] = set()
        self._files: dict[str, AnyTraining] = {}
        """Newest job files of the jobs that run here."""

    async def run(self) -> None:
        """Serve until drained or cancelled.

        Raises:
            RankLost: another rank of this trainer is gone: all of them must be started again. With several ranks, every
                error that ends a session does so, too.
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
            self.bus, self._run_sessions, open_embodied=self._run_sessions, amend=self._amend, on_end=self._cleanup
        )
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
        """Notice a rank that falls silent."""
        liveness = None if self._ranks is None else self._ranks.liveness
        if liveness is not None and (error := await unexpected(liveness.run())) is not None:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """The ranks cannot go on together: this process ends."""
        logger.error("ending, for the ranks of this trainer to start over: %s", _first(error))
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
            logger.error("ending, for the ranks of this trainer to start over: %s", _first(error))
            _end_soon()
            raise error

    async def _meet(self) -> Ranks:
        """The ranks; a process that is the only one of its trainer becomes a rank when a job needs it."""
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
        """A job whose backend changed leaves the one that it has at the next step boundary."""
        if not isinstance(config, AnyTraining):
            return
        self._files[job] = config
        session = self.sessions.get(job)
        if session is not None and config.backend != session.config.backend:
            session.leave(f"to go on with backend '{config.backend.type}'")

    async def _run_sessions(self, job: str, config: AnyTraining) -> None:
        """One after the other, where the backend changes."""
        self._files[job] = config
        try:
            while await self._run_session(job) and self.ready:
                pass
        finally:
            del self._files[job]

    async def _run_session(self, job: str) -> bool:
        """True if it ended because the job moves to another backend."""
        torch.set_num_threads(self._files[job].placement.trainer_threads)
        if self._files[job].backend.type != "local":
            await self._meet()
        config = self._files[job]  # it may have changed meanwhile
        ranks = self._ranks if config.backend.type != "local" else None
        session = TrainerSession(self.bus, self.settings, job, config, ranks)
        self.sessions[job] = session
        try:
            error = await unexpected(session.run())
        finally:  # also where the job was over before the session was
            self.sessions.pop(job, None)
            if ranks is not None and ranks.stranded:
                self._lose(RankLost(ranks.stranded))
        if error is not None and ranks is not None and ranks.place.size > 1:
            # The others may stand anywhere: only a common new start brings the ranks together again.
            if ranks.liveness is not None:
                logger.error("job %s cannot go on: %s", job, ranks.liveness.story())
            self._lose(error)
            await asyncio.Event().wait()  # the process ends
        if error is not None:
            raise error
        return session.leaves

    async def drain(self) -> None:
        """Stop every session at its next step boundary, then the followers. A follower leaves when rank 0 says so."""
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
        """Per job."""
        if self._follower is not None:
            return self._follower.status()
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


def _dismiss(orders: Orders) -> None:
    orders.give(Leave())
    orders.wait_until_taken(LEAVE_S)


async def _follow(follower: Follower, ranks: Ranks) -> None:
    async with Background() as background:
        if ranks.liveness is not None:
            background.spawn(ranks.liveness.run(), name="liveness")
        await follower.run()


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _end_soon() -> None:
    """A thread that waits for a rank that is gone cannot be ended; it would hold up the end for as long as it waits."""
    timer = threading.Timer(END_S, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()
