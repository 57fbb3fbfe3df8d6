"""Observations larger than a message, over the real bus: through shared memory on one host, by TCP from another."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.services.env.service import EnvService
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.embodied.environment import OpenEnv, ResetRequest, StepRequest
from penstock.shared.transport import env_client
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.env_client import EnvClient
from penstock.shared.transport.server import NatsServer
from tests.contract.simulated_envs import FOLDER

JOB = "job_images"
NUM_ENVS, CAMERA = 8, "simulated_envs:Camera-v0"
LARGE_ACTION = (300_000,)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children of the service import the environments."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)


@asynccontextmanager
async def run_env(bus: Bus, **settings: Any) -> AsyncIterator[EnvService]:
    service = EnvService(bus, ServiceSettings(**settings))
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def reset_request(seq: int, *states: int) -> ResetRequest:
    return ResetRequest(seq=seq, env_ids=np.arange(len(states), dtype=np.int32), state_ids=np.asarray(states, np.int64))


def step_request(seq: int, actions: NDArray[np.float32]) -> StepRequest:
    """Return a request with one action for each environment."""
    return StepRequest(
        seq=seq, auto_reset=True, env_ids=np.arange(len(actions), dtype=np.int32), actions=actions[:, None],
        next_state_ids=np.arange(100, 100 + len(actions), dtype=np.int64),
    )  # fmt: skip


HOSTS = {
    "same host": ({"host_id": "here"}, {"host_id": "here"}),
    "same host, other container": ({"host_id": "here"}, {"host_id": "here"}),
    "other host": ({"host_id": "there", "bulk_host": "127.0.0.1"}, {"host_id": "here", "bulk_host": "127.0.0.1"}),
}


@pytest.mark.parametrize("hosts", list(HOSTS))
@pytest.mark.parametrize("action_shape", [(1,), LARGE_ACTION], ids=["small actions", "large actions"])
async def test_images_arrive_as_the_environment_made_them(
    bus: Bus, hosts: str, action_shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole episodes arrive byte for byte; each end has the final image and the first image of the next episode."""
    if hosts == "same host, other container":
        monkeypatch.setattr(env_client, "_mapped", lambda *_: None)
    shm_dir = tmp_path / "shm"
    shm_dir.mkdir()
    theirs, ours = ({**one, "shm_dir": shm_dir} for one in HOSTS[hosts])
    settings = ServiceSettings(**ours)
    num_envs = NUM_ENVS if action_shape == (1,) else 2
    request = OpenEnv(env_id=CAMERA, num_envs=num_envs, options={"action_shape": action_shape})
    local = [gymnasium.make("Camera-v0", disable_env_checker=True, action_shape=action_shape) for _ in range(num_envs)]
    async with run_env(bus, **theirs) as service:
        with FrameMail(settings) as mail:
            client = await EnvClient.open(bus, mail, request, job=JOB)
            assert client.is_mapped == (hosts == "same host")
            expected = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(local)])
            reply = await client.reset(reset_request(0, *range(num_envs)))
            assert reply.observations["state"].nbytes == num_envs * 921_600 > MAX_INLINE_BYTES
            assert np.array_equal(reply.observations["state"], expected)
            for step in range(1, 5):
                actions = np.zeros((num_envs, *action_shape), np.float32)
                actions[:, 0] = np.arange(num_envs) % 2
                expected = np.stack([env.step(action)[0] for env, action in zip(local, actions, strict=True)])
                stepped = await client.step(step_request(step, actions))
                final = stepped.final_observations if step == 4 else stepped.observations
                assert np.array_equal(final["state"], expected)
                assert stepped.ended.all() == (step == 4)
            fresh = np.stack([env.reset(seed=100 + i)[0] for i, env in enumerate(local)])
            assert np.array_equal(stepped.observations["state"], fresh)
            assert service.status()[JOB]["episodes"] == num_envs
            await client.close()
    assert no_files(shm_dir), "nothing stays in shared memory"


def no_files(directory: Path) -> bool:
    return not list(directory.iterdir())


async def test_a_repeated_request_gets_the_same_answer(bus: Bus) -> None:
    """A repeated request is not carried out again, and its images can still be fetched."""
    settings = ServiceSettings(host_id="here")
    async with run_env(bus, host_id="here") as service:
        with FrameMail(settings) as mail:
            client = await EnvClient.open(bus, mail, OpenEnv(env_id=CAMERA, num_envs=2), job=JOB)
            first = (await client.reset(reset_request(0, 1, 2))).observations["state"].copy()
            again = await client.reset(reset_request(0, 1, 2))
            assert np.array_equal(again.observations["state"], first)
            assert service.status()[JOB]["steps"] == 0
            await client.close()


async def test_sessions_whose_images_could_never_arrive_are_refused_at_once(bus: Bus) -> None:
    far = ServiceSettings(host_id="far")
    async with run_env(bus, host_id="here", bulk_bytes=16 << 20):
        with FrameMail(far) as mail:
            with pytest.raises(ConfigError, match="PENSTOCK_BULK_HOST"):
                await EnvClient.open(bus, mail, OpenEnv(env_id=CAMERA, num_envs=1), job=JOB)
            with pytest.raises(ConfigError, match="PENSTOCK_BULK_BYTES"):
                await EnvClient.open(bus, mail, OpenEnv(env_id=CAMERA, num_envs=8), job=JOB)


CLIENT = """
import asyncio, sys
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol.embodied.environment import OpenEnv, ResetRequest
from penstock.shared.transport import env_client
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.env_client import EnvClient
import numpy as np

env_client._mapped = lambda *_: None  # the images are sent

async def main():
    settings = ServiceSettings(host_id="here")
    bus = await Bus.connect(sys.argv[1], name="client")
    mail = FrameMail(settings)
    client = await EnvClient.open(
        bus, mail, OpenEnv(env_id="simulated_envs:Camera-v0", num_envs=8, idle_s=1.0), job="job_images"
    )
    reply = await client.reset(
        ResetRequest(seq=0, env_ids=np.arange(8, dtype=np.int32), state_ids=np.arange(8, dtype=np.int64))
    )
    print(reply.observations["state"].nbytes, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.long
async def test_a_client_that_dies_gives_everything_back(bus: Bus, nats_server: NatsServer) -> None:
    """Its lock on the images ends with it, and its idle session later; the memory then serves the next client."""
    env = {**os.environ, "PENSTOCK_HOST_ID": "here"}
    async with run_env(bus, host_id="here", bulk_bytes=40 << 20) as service:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, nats_server.url, stdout=asyncio.subprocess.PIPE, env=env
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert int(await process.stdout.readline()) == 8 * 921_600
        store = service._mail._store
        segment = next(iter(store._segments.values()))
        assert process.pid in segment.holders()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        async with asyncio.timeout(30):
            while segment.holders() or service.sessions or store._leased:
                await asyncio.sleep(0.05)
        settings = ServiceSettings(host_id="here")
        with FrameMail(settings) as mail:
            for _ in range(3):  # more than the pool could hold had anything stayed
                request = OpenEnv(env_id=CAMERA, num_envs=8)
                client = await EnvClient.open(bus, mail, request, job=JOB)
                await client.reset(reset_request(0, *range(8)))
                await client.close()


async def test_a_service_that_is_gone_is_unavailable(bus: Bus) -> None:
    settings = ServiceSettings(host_id="here")
    with FrameMail(settings) as mail:
        async with run_env(bus, host_id="here"):
            client = await EnvClient.open(bus, mail, OpenEnv(env_id=CAMERA, num_envs=2), job=JOB)
        with pytest.raises(Unavailable):
            await client.reset(reset_request(0, 1, 2), deadline_s=0.5)
