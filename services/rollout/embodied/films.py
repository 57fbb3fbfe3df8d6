"""Videos of held-out episodes: replayed with a copy of the policy in a simulator with a camera.

A rendered frame takes much longer than a step, so videos are made beside training, one after another, in processes of
low priority, and continue after the session of their job. The reset id and the policy's mean determine an episode, so
the video shows what was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.services.rollout.embodied.engine import PolicyEngine
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, PenstockError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.environment import ResetReply, ResetRequest, StepReply, StepRequest
from penstock.shared.protocol.embodied.video import Video, video_headers
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus, Outgoing
from penstock.shared.transport.env_client import EnvClient

__all__ = ["FilmMaker", "Shot"]

logger = logging.getLogger(__name__)

MOST_WAITING = 16
"""Maximum number of queued videos; further ones are dropped."""
OPEN_S = 200.0
MARGIN_S = 30.0
FILM_LIMIT_S = 300.0
"""Time limit of one video."""
PUBLISH_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shot:
    """A held-out episode to film. ``policy`` is a copy that is never updated."""

    job: str
    config: EmbodiedJob
    policy: PolicyEngine
    version: int
    reset_id: int


class FilmMaker:
    """Makes the videos of a rollout worker."""

    def __init__(self, bus: Bus, settings: ServiceSettings) -> None:
        self._bus, self._settings = bus, settings
        self._waiting: asyncio.LifoQueue[Shot] = asyncio.LifoQueue(MOST_WAITING)
        """Queued videos; last in, first out, because the newest is the most informative."""
        self._without: set[str] = set()
        """Jobs with `videos: auto` whose simulator cannot film."""

    def want(self, shot: Shot) -> None:
        """Queue a video, unless the simulator cannot film. If the queue is full, drop the video with a warning."""
        if shot.job in self._without:
            return
        try:
            self._waiting.put_nowait(shot)
        except asyncio.QueueFull:
            logger.warning("job %s: no time to film version %d, reset id %d", shot.job, shot.version, shot.reset_id)

    async def run(self) -> None:
        """Make videos until cancelled."""
        while True:
            shot = await self._waiting.get()
            if shot.job in self._without:
                continue
            try:
                async with asyncio.timeout(FILM_LIMIT_S):
                    await self._make(shot)
            except (PenstockError, TimeoutError) as error:
                await self._report_failure(shot, error)

    async def _report_failure(self, shot: Shot, error: PenstockError | TimeoutError) -> None:
        reason = str(error) or f"the film took longer than {FILM_LIMIT_S:g} s"
        logger.warning("job %s: version %d, reset id %d: no film: %s", shot.job, shot.version, shot.reset_id, reason)
        if shot.config.evaluation.videos == "auto":
            self._without |= {shot.job} if isinstance(error, ConfigError) else set()
            return
        try:
            await self._publish(shot, b"", _video(shot, error=reason))
        except PenstockError as second:
            logger.warning("job %s: that cannot be told: %s", shot.job, second)

    async def _make(self, shot: Shot) -> None:
        """Make and publish one video. Raises PenstockError if that fails."""
        mail = await asyncio.to_thread(FrameMail, self._settings)
        try:
            request = shot.config.held_out_simulator.opening(1, camera=True)
            client = await EnvClient.open(self._bus, mail, request, job=shot.job, deadline_s=OPEN_S)
            try:
                facts = await _play(client, shot)
                data, reason = await client.film(0, deadline_s=MARGIN_S + shot.config.held_out_simulator.step_limit_s)
            finally:
                with contextlib.suppress(PenstockError):  # which would take the place of a cancellation
                    await client.close()
        finally:
            await asyncio.to_thread(mail.close)
        if reason:
            raise ConfigError(reason)
        await self._publish(shot, data, facts)

    async def _publish(self, shot: Shot, data: bytes, facts: Video) -> None:
        message = Outgoing(
            subjects.videos(shot.job), data, video_headers(facts), f"{shot.job}:video:{facts.name}:{bool(data)}"
        )
        await self._bus.publish_whole([message], deadline_s=PUBLISH_S)


def _video(shot: Shot, **facts: Any) -> Video:
    name = f"{shot.version}-{shot.reset_id}.mp4"
    return Video(name=name, version=shot.version, reset_id=shot.reset_id, **facts)


async def _play(client: EnvClient, shot: Shot) -> Video:
    """Play the episode with the policy's mean actions; return its video. Raises PenstockError if the simulator
    fails."""
    sim = shot.config.held_out_simulator
    limit_s = sim.step_limit_s + MARGIN_S
    env_ids, total, steps = np.zeros(1, np.int32), 0.0, 0
    request = ResetRequest(seq=client.seq, env_ids=env_ids, state_ids=np.array([shot.reset_id], np.int64))
    reply: ResetReply | StepReply = await client.reset(request, deadline_s=limit_s)
    task, success, ended = "".join(reply.tasks), False, False
    while not ended and not reply.lost.any():
        decided = await shot.policy.decide(reply.observations, None)
        actions = decided.executed[:, : sim.horizon - steps]
        reply = await client.step(
            StepRequest(
                seq=client.seq, auto_reset=False, env_ids=env_ids, actions=actions,
                next_state_ids=np.zeros(0, np.int64),
            ),
            deadline_s=limit_s,
        )  # fmt: skip
        total, steps = total + float(reply.rewards.sum()), steps + int(reply.valid[0])
        success = success or bool(reply.success.any())
        ended = bool(reply.ended[0]) or steps >= sim.horizon
    if reply.lost.any():
        raise ConfigError("".join(reply.reasons) or "the simulator lost the episode")
    return _video(shot, task=task, success=success, total=total, steps=steps)
