"""One embodied job on one rollout worker: policy, simulator sessions, and tickets in progress."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from penstock.services.rollout.conversations.asking import Asking
from penstock.services.rollout.embodied.engine import PolicyEngine
from penstock.services.rollout.embodied.episodes import UNEQUAL, Episode, episode_group, failed_episodes
from penstock.services.rollout.embodied.films import FilmMaker, Shot
from penstock.services.rollout.embodied.noise import NoiseSource
from penstock.services.rollout.embodied.queue import EpisodeQueue
from penstock.services.rollout.embodied.simulators import SimulatorSession
from penstock.services.rollout.policy import PolicyFollower
from penstock.services.rollout.publisher import GroupPublisher
from penstock.services.rollout.tickets import LeftBehind, TicketTaker
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models.episode_policy import build_policy
from penstock.shared.models.loading import resolve_device
from penstock.shared.protocol import subjects
from penstock.shared.protocol.messages import Ticket
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus

__all__ = ["EmbodiedSession"]

logger = logging.getLogger(__name__)


class EmbodiedSession:
    """Takes tickets of one job while lanes are free, plays their episodes, and publishes the results."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, config: EmbodiedJob, films: FilmMaker) -> None:
        self._bus, self._settings, self.job, self.config, self._films = bus, settings, job, config, films
        self._filmed: PolicyEngine | None = None
        """Policy copy used for the newest videos."""
        self._publisher, self._asking = GroupPublisher(bus, job), Asking(bus)
        self._tickets = TicketTaker(
            bus, job, self._asking, answer=self._attempt, give_up=self._give_up, room=self._room,
            progress=self._progress,
        )  # fmt: skip
        self._queue = self._held_out = EpisodeQueue(config.environment.sessions)
        """Queues of training and of held-out episodes: one queue, unless another simulator plays the held-out ones."""
        if config.evaluation.environment is not None:
            self._held_out = EpisodeQueue(1)
        self._simulators: list[SimulatorSession] = []
        """Sessions of `environment`, followed by the one of `evaluation.environment` if the job has it."""
        self._engine: PolicyEngine | None = None
        self._policy: PolicyFollower | None = None
        self._unfinished = 0
        """Number of episodes of current tickets that have not ended."""
        self.groups = self.episodes = self.lost = self.unequal = 0

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled, or until the last ticket is done after ``drain``.

        Raises:
            ConfigError: the policy does not fit the simulator.
        """
        mail = await asyncio.to_thread(FrameMail, self._settings)
        simulator = self.config.environment
        self._simulators = [
            SimulatorSession(self._bus, mail, self.job, simulator, self._asking, number=number)
            for number in range(simulator.sessions)
        ]
        if self.config.evaluation.environment is not None:
            other = self.config.evaluation.environment
            self._simulators.append(
                SimulatorSession(self._bus, mail, self.job, other, self._asking, number=0, name="held-out session")
            )
        try:
            await self._work()
        finally:
            await asyncio.gather(*(session.close() for session in self._simulators))
            if self._engine is not None:
                await self._engine.close()
            await asyncio.to_thread(mail.close)

    async def _work(self) -> None:
        config = self.config
        async with asyncio.TaskGroup() as opening:
            opened = [opening.create_task(session.open()) for session in self._simulators]
        policy = build_policy(
            config.policy, opened[0].result(), action_chunk=config.environment.action_chunk, seed=config.seed
        )
        self._engine = PolicyEngine(policy, device=resolve_device(config.placement.device))
        self._policy = PolicyFollower(self._bus, self._settings, self.job, self._engine)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._policy.run()), tasks.create_task(self._publisher.run())]
            self._asking.wait("policy", "the first policy version", subjects.MANIFESTS)
            await self._policy.first()
            self._asking.done("policy")
            queues = [self._queue] * config.environment.sessions + [self._held_out]
            for session, queue in zip(self._simulators, queues, strict=False):
                background.append(tasks.create_task(session.run(self._engine, queue)))
            await self._tickets.run()
            for task in background:
                task.cancel()

    def amend(self, config: EmbodiedJob) -> None:
        """Use a changed config for the next tickets."""
        self.config = config

    def drain(self) -> None:
        """Take no more tickets."""
        self._tickets.drain()

    def _room(self) -> int:
        """Return how many more tickets to take, so that the first episode of each finds a free lane."""
        simulator, group = self.config.environment, self.config.algorithm.group_size
        free = simulator.sessions * simulator.num_envs - self._unfinished
        return -(-free // group) - self._tickets.num_unbegun

    def _progress(self) -> int | None:
        if self._engine is None or not any(session.num_running for session in self._simulators):
            return None
        return self._engine.num_decisions

    # -- one ticket --------------------------------------------------------------------------------------------------

    async def _attempt(self, ticket: Ticket, key: str) -> None:
        if ticket.purpose == "eval":
            await self._evaluate(ticket, key)
        else:
            await self._answer(ticket, key)

    async def _answer(self, ticket: Ticket, key: str) -> None:
        assert self._engine is not None
        start, config = time.perf_counter(), self.config
        episodes = [
            Episode(
                reset_id=config.environment.reset_id(ticket.draw.ordinal),
                noise=NoiseSource(
                    config.seed, ticket.draw, member, kind=self._engine.noise, shape=self._engine.noise_shape
                ),
            )
            for member in range(config.algorithm.group_size)
        ]
        await self._play(ticket, key, episodes, self._queue, oldest=ticket.min_version)
        meta = {"worker": self._settings.worker_id, "seconds": time.perf_counter() - start}
        group = episode_group(self.job, config, ticket, episodes, meta=meta)
        if UNEQUAL in group.meta.get("error", ""):
            self.unequal += 1
            logger.error("job %s: %s", self.job, group.meta["error"])
        await self._publisher.publish(group)
        self.groups += 1

    async def _evaluate(self, ticket: Ticket, key: str) -> None:
        version = ticket.version or 0
        episode = Episode(reset_id=self.config.evaluation.first_reset_id + ticket.draw.ordinal, version=version)
        await self._play(ticket, key, [episode], self._held_out, oldest=version)
        if episode.superseded_by is not None:
            raise LeftBehind(f"version {version} was left behind for {episode.superseded_by}")
        record = episode.record
        if record is None:
            await self._give_up(ticket, key, episode.lost)
            return
        if ticket.draw.ordinal < self.config.evaluation.num_videos:
            await self._film(version, episode.reset_id)
        measured = record.total, float(record.succeeded), float(record.valid.sum())
        await self._send_result(ticket, key, measured, failed=False)

    async def _film(self, version: int, reset_id: int) -> None:
        """Queue a video of episode ``reset_id``. Uses a copy of the policy, because updates do not wait for videos."""
        assert self._engine is not None
        if self._filmed is None or self._filmed.version != version:
            self._filmed = await self._engine.copy()
        if self._filmed.version == version:  # a restarted leader may have reverted the version meanwhile
            self._films.want(
                Shot(job=self.job, config=self.config, policy=self._filmed, version=version, reset_id=reset_id)
            )

    async def _send_result(
        self, ticket: Ticket, key: str, measured: tuple[float, float, float], *, failed: bool
    ) -> None:
        parts = {name: [value] for name, value in zip(("return", "success", "length"), measured, strict=True)}
        await self._tickets.report(ticket, key, [measured[0]], failed=[failed], greedy=[True], parts=parts)

    async def _give_up(self, ticket: Ticket, key: str, reason: str) -> None:
        if ticket.purpose == "eval":
            await self._send_result(ticket, key, (0.0, 0.0, 0.0), failed=True)
            return
        meta = {"worker": self._settings.worker_id, "error": reason}
        await self._publisher.publish(failed_episodes(self.job, self.config, ticket, meta))

    async def _play(
        self, ticket: Ticket, key: str, episodes: list[Episode], queue: EpisodeQueue, *, oldest: int
    ) -> None:
        """Play all episodes and return once they have ended. A cancellation marks the episodes as unwanted."""
        assert self._policy is not None
        ended, left = asyncio.Event(), len(episodes)
        self._unfinished += left

        def on_end(episode: Episode) -> None:
            nonlocal left
            left -= 1
            self._unfinished -= 1
            self.episodes += episode.record is not None
            self.lost += bool(episode.lost) and not episode.unwanted
            self._tickets.look_again()
            if not left:
                ended.set()

        for episode in episodes:
            episode.on_end = on_end
        try:
            await self._tickets.reach(self._policy, ticket, key, oldest=oldest)
            queue.add(episodes)
            await ended.wait()
        finally:
            for episode in episodes:
                episode.unwanted = True
                episode.on_end = lambda _: None
            self._unfinished -= left

    # -- what others see ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return True if tickets are in progress."""
        return self._tickets.busy

    def status(self) -> dict[str, Any]:
        """Return the job's entry in the heartbeat of this worker."""
        policy = self._policy
        row = {
            "version": policy.version if policy else -1,
            "running": sum(session.num_running for session in self._simulators),
            "decisions": self._engine.num_decisions if self._engine else 0,
            "steps": sum(session.num_steps for session in self._simulators),
            "episodes": self.episodes,
            "lost": self.lost,
            "groups": self.groups,
            "unequal": self.unequal,
        } | (policy.status() if policy else {})
        return row | self._tickets.status(self._publisher)
