"""The reward process: runs a session for every job, and graders on request."""

from __future__ import annotations

from typing import Any

from penstock.services.reward.grading import GradingService
from penstock.services.reward.session import RewardSession
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.runtime.jobs import Breaks, watch_jobs
from penstock.shared.transport.bus import Bus

__all__ = ["RewardService"]


class RewardService:
    """Opens and closes sessions as jobs start and end."""

    name = "reward"

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self.bus, self.settings = bus, settings
        self.sessions: dict[str, RewardSession] = {}
        self.ready = False
        self._draining = False
        self._breaks = Breaks()

    async def run(self) -> None:
        """Serve until drained or cancelled."""
        async with await GradingService(self.bus).open():
            self.ready = True
            await watch_jobs(self.bus, self._run_session, open_evaluation=self._run_session, breaks=self._breaks)

    async def _run_session(self, job: str, config: TextJob) -> None:
        if self._draining or not config.reward.scorers:  # an online job without measurements
            return
        session = RewardSession(self.bus, self.settings, job, config)
        self.sessions[job] = session
        try:
            await session.run()
        finally:
            session.ended.set()
            self.sessions.pop(job, None)

    async def drain(self) -> None:
        """Finish requests and groups in progress; accept no new ones."""
        self.ready = False
        self._draining = True
        sessions = list(self.sessions.values())
        for session in sessions:
            session.drain()
        for session in sessions:
            await session.ended.wait()

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the heartbeat entries by job."""
        return self._breaks.add_to({job: session.status() for job, session in self.sessions.items()})
