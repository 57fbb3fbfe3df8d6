"""Episodes whose simulators or env workers die, hang or leave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.rollout.embodied import simulators
from penstock.services.rollout.embodied.engine import Decided, PolicyEngine
from penstock.services.rollout.embodied.films import FilmMaker, Shot
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models.episode_policy import build_policy
from penstock.shared.protocol import subjects
from penstock.shared.transport import env_client
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.env_client import EnvClient
from penstock.shared.transport.server import NatsServer
from tests.contract.simulated_envs import DIE, FOLDER, NOT_A_NUMBER, RAISE
from tests.integration.embodied_worker import JOB, PATIENCE_S, env_service, job, spec_of, until, worker_of
from tests.integration.test_embodied_rollout import always

STOP_S = 20.0
LONG = {"options": {"max_episode_steps": 1_000_000}, "bytes_per_step": 128}


def children() -> list[psutil.Process]:
    """Return the simulator processes below this process."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if any(word.endswith("simulators/child.py") for word in child.cmdline())]


@pytest.mark.parametrize(
    ("action", "reason"),
    [(RAISE, "the arm left the table"), (NOT_A_NUMBER, "observation 'steps' is not finite"), (DIE, "SIGKILL")],
)
async def test_a_group_without_any_episode_names_the_reason(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: int, reason: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    config = job("simulated_envs:Fragile-v0", horizon=9, policy="categorical", observations=["steps"])
    async with env_service(bus), worker_of(bus, tmp_path, config, prepare=always(action)) as worker:
        await worker.ask(0)
        [group] = await worker.groups(1)
        [header] = await worker.headers()
        assert (group.num_trajectories, header.lengths) == (0, [])
        assert reason in header.error
        await worker.ask(0, version=1)
        await until(lambda: len(worker.results) == 1)
        assert (worker.results[0].failed, worker.results[0].rewards) == ([True], [0.0])
        assert worker.session.status()["lost"] == 3


@pytest.mark.parametrize(("sign", "reason"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "hung for 2 s")])
@pytest.mark.long
async def test_only_the_episodes_of_a_broken_process_fail(
    bus: Bus, tmp_path: Path, sign: signal.Signals, reason: str
) -> None:
    """One session has two processes; that of lanes 0 and 1 breaks during episodes. The next group succeeds."""
    config = job(
        "Pendulum-v1", horizon=300, group=4, num_envs=4, sessions=1, num_processes=2, step_limit_s=2.0, **LONG
    )  # fmt: skip
    async with env_service(bus), worker_of(bus, tmp_path, config) as worker:
        await worker.ask(0)
        await until(lambda: worker.session.status()["decisions"] > 20)
        first = min(children(), key=lambda child: child.create_time())
        os.kill(first.pid, sign)
        [group] = await worker.groups(1)
        assert sorted(group.failed.tolist()) == [False, False, True, True]
        assert [int(length) for length in group.lengths] == [0 if failed else 300 for failed in group.failed]
        [header] = await worker.headers()
        assert reason in header.error
        await worker.ask(1)
        _, healed = await worker.groups(2)
        assert not healed.failed.any()


@asynccontextmanager
async def env_process(nats_server: NatsServer) -> AsyncIterator[asyncio.subprocess.Process]:
    """An env service in its own process."""
    env = {**os.environ, "PENSTOCK_NATS_URL": nats_server.url}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock.services.env", env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.long
async def test_episodes_of_an_env_worker_that_is_killed_are_lost(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker opens its sessions again on the next env worker, and reports until then that it waits for one."""
    monkeypatch.setattr(env_client, "GONE_S", 0.5)
    config = job("Pendulum-v1", horizon=400, **LONG)
    async with worker_of(bus, tmp_path, config) as worker:
        await until(lambda: worker.session.status().get("waiting_for") == "an env worker to open 'Pendulum-v1'")
        async with env_process(nats_server) as process:
            await worker.ask(0)
            await until(lambda: worker.session.status()["decisions"] > 10)
            process.kill()
            [group] = await worker.groups(1)
        assert group.num_trajectories == 0
        assert "the session of simulators is gone" in group.meta["error"]
        await until(lambda: worker.session.status().get("waiting_for") == "an env worker to open 'Pendulum-v1'")
        await worker.ask(0, 1)
        async with env_process(nats_server):
            _, again = await worker.groups(2)
            assert not again.failed.any()
            assert "waiting_for" not in worker.session.status()


@pytest.mark.long
async def test_an_idle_worker_keeps_its_sessions(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for tickets keeps its sessions; the session of a client that died ends with its lease."""
    keep, kept = EnvClient.keep, Counter[str]()

    async def counted(self: EnvClient) -> None:
        await keep(self)
        kept[self.subject] += 1

    monkeypatch.setattr(EnvClient, "keep", counted)
    monkeypatch.setattr(simulators, "IDLE_S", 1.5)
    monkeypatch.setattr(simulators, "KEEP_S", 0.2)
    async with env_service(bus) as service:
        async with worker_of(bus, tmp_path, job("Pendulum-v1", horizon=4)) as worker:
            await until(lambda: len(kept) == 2 and min(kept.values()) > 10)  # more than the lease of 1.5 s
            assert {subjects.env(name) for name in service.sessions} == set(kept)
            await worker.ask(0)
            await worker.groups(1)
            monkeypatch.setattr(EnvClient, "close", never)
        await until(lambda: not service.sessions)


async def never(_: Any) -> None:
    """Leave the session open, as a killed worker does."""


class Hesitating(PolicyEngine):
    """Policy whose decisions never end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked = asyncio.Event()

    async def decide(self, *_: Any) -> Decided:
        """Wait until cancelled."""
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.long
async def test_a_worker_can_stop_in_a_film_whose_env_worker_has_left(bus: Bus, tmp_path: Path) -> None:
    """The cancelled film closes its session without an answer, as in a deployment that stops all services at once."""
    config = job("CartPole-v1", horizon=30, policy="categorical")
    spec = await asyncio.to_thread(spec_of, config)
    engine = Hesitating(build_policy(config.policy, spec, action_chunk=1, seed=7))
    films = FilmMaker(bus, ServiceSettings(host_id="elsewhere", shm_dir=tmp_path, data_dir=tmp_path))
    films.want(Shot(job=JOB, config=config, policy=engine, version=1, reset_id=1))
    making = asyncio.create_task(films.run())
    async with env_service(bus):
        await asyncio.wait_for(engine.asked.wait(), PATIENCE_S)
    making.cancel()
    await asyncio.wait([making], timeout=STOP_S)
    assert making.cancelled()
