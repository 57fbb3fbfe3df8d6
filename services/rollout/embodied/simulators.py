"""One simulator session of a worker. If the session's env worker is lost, another env worker opens it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import numpy as np

from penstock.services.rollout.conversations.asking import Asking
from penstock.services.rollout.embodied.engine import PolicyEngine
from penstock.services.rollout.embodied.lanes import Lanes, Rows
from penstock.services.rollout.embodied.queue import EpisodeQueue
from penstock.shared.config.embodied import SimulatorBase
from penstock.shared.errors import ConfigError, PenstockError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.embodied.environment import EnvSpec, ResetRequest, StepRequest
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.env_client import EnvClient

__all__ = ["SimulatorSession"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 200.0
"""Timeout to open a session; longer than an env worker may take to create simulators."""
OPEN_RETRY_S = 2.0
MARGIN_S = 15.0
"""Seconds that the client waits for a reply beyond the simulator's own limit for one request."""
RESET_S = 180.0
"""Additional seconds that the client waits for a reset, which may start a process that imports the simulator."""
IDLE_S = 60.0
"""Time without requests after which the env worker closes the session, assuming that its client is dead."""
KEEP_S = 15.0
CLOSE_S = 2.0
TELL_AFTER_S = 1.0
"""Duration after which a simulator request is reported in the heartbeat as what the job waits for."""


class SimulatorSession:
    """Plays episodes in the environments of one session, one episode in each environment at a time."""

    def __init__(
        self,
        bus: Bus,
        mail: FrameMail,
        job: str,
        config: SimulatorBase,
        asking: Asking,
        *,
        number: int,
        name: str = "session",
    ) -> None:
        self._bus, self._mail, self._job, self._config, self._asking = bus, mail, job, config, asking
        self._number, self._key = number, f"{name} {number}"
        self._client: EnvClient | None = None
        self._lanes: Lanes | None = None
        self.num_steps = 0
        """Number of actions that simulators executed."""
        self.num_opened = 0

    @property
    def num_running(self) -> int:
        """Number of episodes in the lanes of this session."""
        return self._lanes.num_running if self._lanes is not None else 0

    async def open(self) -> EnvSpec:
        """Open the environments on an env worker; wait until one can open them."""
        config = self._config
        request = config.opening(config.num_envs, idle_s=IDLE_S)
        what = f"an env worker to open '{config.task}'"
        while True:
            self._asking.wait(self._key, what, subjects.ENV_OPEN)
            try:
                client = await EnvClient.open(self._bus, self._mail, request, job=self._job, deadline_s=OPEN_S)
            except Unavailable:
                continue
            except ConfigError as error:  # another env worker may support it
                logger.error("an env worker cannot open '%s': %s", config.task, error)
                self._asking.done(self._key)
                self._asking.wait(self._key, f"{what}: {error}", subjects.ENV_OPEN)
                await asyncio.sleep(OPEN_RETRY_S)
                self._asking.done(self._key)
                continue
            self._asking.done(self._key)
            self._client = client
            self.num_opened += 1
            return client.spec

    async def close(self) -> None:
        """Close the environments. An env worker that does not respond closes them itself after ``IDLE_S``."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(PenstockError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await client.close()

    async def run(self, engine: PolicyEngine, queue: EpisodeQueue) -> None:
        """Play episodes of the queue until cancelled. If the session is lost, its episodes are lost, too.

        Raises:
            ConfigError: after the session was opened again, its observation or action spaces differ.
        """
        assert self._client is not None
        spec = self._client.spec
        self._lanes = Lanes(
            spec, horizon=self._config.horizon, noise_shape=engine.noise_shape, action_dtype=engine.action_dtype
        )
        while True:
            try:
                await self._play(self._lanes, engine, queue)
            except PenstockError as error:
                logger.warning("%s of job %s is gone: %s", self._key, self._job, error)
                queue.report(self._number, None)
                self._lanes.lose(f"the session of simulators is gone: {error}")
            await self.close()
            found = await self.open()
            if (found.observations, found.action_shape) != (spec.observations, spec.action_shape):
                raise ConfigError(f"'{spec.env_id}' is {found} on one env worker and {spec} on another")

    async def _play(self, lanes: Lanes, engine: PolicyEngine, queue: EpisodeQueue) -> None:
        """Play episodes. Raises PenstockError if the session is lost."""
        while True:
            lanes.leave_unwanted()
            queue.report(self._number, lanes.num_running)
            if episodes := queue.take(self._number, lanes.num_free):
                await self._begin(lanes, *lanes.place(episodes))
                queue.report(self._number, lanes.num_running)
            if lanes.num_running:
                for rows in lanes.to_decide():
                    await self._advance(lanes, engine, rows)
            elif not await queue.wait(self._number, KEEP_S):
                await self._keep()

    async def _begin(self, lanes: Lanes, rows: Rows, reset_ids: np.ndarray) -> None:
        assert self._client is not None
        request = ResetRequest(seq=self._client.seq, env_ids=rows, state_ids=reset_ids)
        asked = self._client.reset(request, deadline_s=self._config.step_limit_s + RESET_S + MARGIN_S)
        lanes.began(rows, await self._reply_of(asked, "a simulator to begin episodes"))

    async def _advance(self, lanes: Lanes, engine: PolicyEngine, rows: Rows) -> None:
        """Decide for lanes of one kind (noise or mean), and execute the decisions up to the horizon."""
        assert self._client is not None
        decided = await engine.decide(*lanes.inputs(rows))
        executed = lanes.decided(rows, decided)
        limits = lanes.limits(rows)
        for limit in np.unique(limits[executed]).tolist():  # more than one only if the horizon cuts a chunk
            chosen = executed & (limits == limit)
            request = StepRequest(
                seq=self._client.seq, auto_reset=False, env_ids=rows[chosen],
                actions=decided.executed[chosen, :limit], next_state_ids=np.zeros(0, np.int64),
            )  # fmt: skip
            asked = self._client.step(request, deadline_s=self._config.step_limit_s + MARGIN_S)
            reply = await self._reply_of(asked, "a simulator to step")
            self.num_steps += int(reply.valid.sum())
            lanes.stepped(rows[chosen], reply)

    async def _keep(self) -> None:
        assert self._client is not None
        await self._client.keep()

    async def _reply_of(self, asked: Awaitable[T], what: str) -> T:
        """Return the reply of a simulator; report the wait if it takes longer than ``TELL_AFTER_S``."""
        assert self._client is not None
        with self._reporting(what, self._client.subject):
            return await asked

    @contextlib.contextmanager
    def _reporting(self, what: str, subject: str) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        later = loop.call_later(TELL_AFTER_S, self._asking.wait, self._key, what, subject)
        try:
            yield
        finally:
            later.cancel()
            self._asking.done(self._key)
