"""A rollout worker of an embodied job on a real bus, with published weights, tickets, and the results that it sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.services.env.service import EnvService
from penstock.services.env.simulators import describe_simulator
from penstock.services.rollout.embodied.films import FilmMaker
from penstock.services.rollout.embodied.session import EmbodiedSession
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models.episode_policy import EpisodePolicy, build_policy
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup, decode_episode_group
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ack, EvalResult, Ticket
from penstock.shared.protocol.trajectory import GroupHeader, parse_group_header
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import layout_of, open_publisher
from penstock.shared.weights.open import Publisher

JOB = "job_embodied"
NOWHERE = Path("/nonexistent")
PATIENCE_S = 90


def job(task: str, *, horizon: int, policy: str = "gaussian", group: int = 2, **environment: Any) -> EmbodiedJob:
    """Return an embodied job; ``environment`` holds more keys of its ``environment`` section."""
    names = environment.pop("observations", ["state"])
    return EmbodiedJob.parse(
        {
            "kind": "embodied",
            "name": "arm",
            "seed": 7,
            "environment": {
                "task": task, "horizon": horizon, "num_envs": 2, "sessions": 2, "num_reset_ids": 1000, **environment,
            },
            "policy": {"type": policy, "hidden_sizes": [8], "observations": names},
            "algorithm": {"type": "grpo", "group_size": group} if group > 1 else {"type": "ppo"},
            "train": {"batch_size": 4 * group, "max_updates": 1, "max_lag": 4},
            "limits": {"byte_budget": 4 << 30},
        }
    )  # fmt: skip


def spec_of(config: EmbodiedJob) -> EnvSpec:
    """Return the description of a job's simulator."""
    return describe_simulator(config.environment.opening(1), NOWHERE)


class Worker:
    """The worker under test; methods play its trainer and its coordinator."""

    def __init__(self, bus: Bus, settings: ServiceSettings, config: EmbodiedJob, policy: EpisodePolicy) -> None:
        self.bus, self.settings, self.config, self.policy = bus, settings, config, policy
        self.session = EmbodiedSession(bus, settings, JOB, config, FilmMaker(bus, settings))
        self.results: list[EvalResult] = []
        self.digests: dict[int, str] = {}
        self._publisher: Publisher | None = None

    async def show(self, version: int) -> None:
        """Publish the weights of ``policy`` as a version."""
        tensors = [(name, tensor.detach().clone()) for name, tensor in self.policy.state_dict().items()]
        if self._publisher is None:
            self._publisher = open_publisher(JOB, layout_of(tensors), self.settings)
        manifest = self._publisher.publish(tensors, version=version, epoch=1)
        self.digests[version] = manifest.digest
        await self.bus.kv(subjects.MANIFESTS).put(JOB, pack(manifest, job=JOB, id="m", epoch=1))

    async def ask(
        self, ordinal: int, n: int = 0, *, version: int | None = None, oldest: int = 0, deadline_s: float = PATIENCE_S
    ) -> None:
        """Publish a ticket for a draw; with ``version``, a ticket to evaluate that version."""
        ticket = Ticket(
            draw=Draw(ordinal, n), min_version=oldest, deadline=time.time() + deadline_s, deadline_s=deadline_s,
            epoch=1, purpose="train" if version is None else "eval", version=version,
        )  # fmt: skip
        await self.bus.publish(subjects.tickets(JOB), pack(ticket, job=JOB))

    async def on_result(self, data: bytes) -> bytes:
        result, envelope = unpack(data, EvalResult)
        self.results.append(result)
        return pack(Ack(ok=True), job=JOB, id=envelope.id)

    async def headers(self) -> list[GroupHeader]:
        messages = await self.bus.read(subjects.EXPERIENCE, subjects.experience(JOB), headers_only=True)
        return [parse_group_header(message.headers) for message in messages]

    async def groups(self, number: int) -> list[EpisodeGroup]:
        """Wait for ``number`` groups, and return them ordered by draw."""
        await until(self.published, number)
        messages = await self.bus.read(subjects.EXPERIENCE, subjects.experience(JOB), headers_only=True)
        whole = await self.bus.get_whole(subjects.EXPERIENCE, [message.seq for message in messages])
        groups = [decode_episode_group(message.data) for message in whole.values()]
        assert len({group.draw for group in groups}) == len(groups) == number, "one group of each draw"
        return sorted(groups, key=lambda group: group.draw)

    async def published(self, number: int) -> bool:
        return len(await self.headers()) >= number

    async def tickets_left(self) -> int:
        return (await self.bus.stream_state(subjects.TICKETS)).messages

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


async def until(holds: Callable[..., Any], *args: Any) -> None:
    """Wait until a condition, synchronous or not, holds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = holds(*args)
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def env_service(bus: Bus, directory: Path | None = None) -> AsyncIterator[EnvService]:
    """Run an env service in this process; it shares memory with the worker through ``directory``."""
    service = EnvService(bus, ServiceSettings() if directory is None else ServiceSettings(shm_dir=directory))
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def worker_of(
    bus: Bus, directory: Path, config: EmbodiedJob, *, prepare: Callable[[EpisodePolicy], None] | None = None
) -> AsyncIterator[Worker]:
    """Run a worker whose trainer has published version 1: the initial weights, after ``prepare`` changed them."""
    spec = await asyncio.to_thread(spec_of, config)
    policy = build_policy(config.policy, spec, action_chunk=config.environment.action_chunk, seed=config.seed)
    if prepare is not None:
        prepare(policy)
    settings = ServiceSettings(worker_id="rollout-0", shm_dir=directory, data_dir=directory)
    worker = Worker(bus, settings, config, policy)
    await worker.show(1)
    server = await bus.serve(subjects.evaluation(JOB), worker.on_result)
    task = asyncio.create_task(worker.session.run())
    try:
        yield worker
        assert not task.done() or task.exception() is None, task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.close(0.5)
        worker.close()
