"""Grading of one answer on request, outside of jobs, so that users can test a grader before training with it."""

from __future__ import annotations

import asyncio
import time

from pydantic import ValidationError

from penstock.services.reward.channel import Score
from penstock.services.reward.process import ScorerProcess
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.errors import ProtocolError, ScoringError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.grading import OPEN_S, GradeReply, GradeRequest, error_text, split_error
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.serve import Server

__all__ = ["GradingService"]

QUEUE = "reward"
MAX_CONCURRENT = 2
"""Maximum number of requests that are graded at once, each in its own process."""
MAX_WAITING = 16
"""Maximum number of requests that wait; the service refuses more."""
_MAX_READ = 4 * (MAX_CONCURRENT + MAX_WAITING)
"""Maximum number of requests that are read from the bus at once: enough to refuse excess requests without delay."""


class GradingService:
    """Serves grading requests. Each request runs in its own process, which is killed at the deadline."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)
        self._waiting = 0

    async def open(self) -> Server:
        """Start to serve grading requests."""
        return await self._bus.serve(subjects.GRADE, self._on_request, queue=QUEUE, max_concurrent=_MAX_READ)

    async def _on_request(self, data: bytes) -> bytes:
        came = time.monotonic()
        request, envelope = unpack(data, GradeRequest)
        if self._waiting >= MAX_WAITING:
            raise Unavailable(f"{self._waiting} requests wait to be graded here already")
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            if time.monotonic() - came >= request.wait_s:
                raise Unavailable("nobody waits for the grade any more")
            return pack(await grade(request), job=envelope.job, id=envelope.id, trace=envelope.trace)
        finally:
            self._turns.release()


async def grade(request: GradeRequest) -> GradeReply:
    """Open the scorers, score the sample if there is one, and return the scores or the error.

    Raises:
        ProtocolError: the scorer configs are invalid.
    """
    started = time.monotonic()
    try:
        config = RewardConfig.model_validate({"scorers": request.scorers, "timeout_s": 3600, "open_timeout_s": OPEN_S})
    except ValidationError as error:
        raise ProtocolError(f"the scorers cannot be read: {error}") from None
    scores, problem = [], ""
    try:
        process = await ScorerProcess.start(config)
    except ScoringError as error:
        return GradeReply(error=_with_kind(str(error)), seconds=time.monotonic() - started)
    try:
        if request.sample is not None:
            process.submit(Score(request.prompt, [request.sample], request.answer, request.item))
            result = await process.result(request.deadline_s)
            scores, problem = result.scores, result.error
    except ScoringError as error:  # killed at the deadline, or crashed
        problem = error_text("unresponsive_reward_error", str(error))
    finally:
        await process.kill()
    return GradeReply(scores=scores, error=_with_kind(problem), seconds=time.monotonic() - started, opened=True)


def _with_kind(problem: str) -> str:
    """Return the error text ``problem`` with a kind of error as its prefix: its own if it has one already, else
    ``other_error``. Return '' if ``problem`` is empty."""
    return error_text(*split_error(problem)) if problem else ""
