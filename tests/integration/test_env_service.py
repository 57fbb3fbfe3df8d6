"""The env service on a real bus: whole CartPole episodes, repeated requests, idle sessions, a real process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import gymnasium
import msgspec
import numpy as np
import psutil
import pytest

from penstock.services.coordinator.queries.logfiles import read_logs
from penstock.services.env import session
from penstock.services.env.service import EnvService
from penstock.services.env.session import _readable
from penstock.services.env.simulators.child import Channel
from penstock.services.env.simulators.process import ProcessSimulator
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Conflict, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.embodied.environment import (
    CloseRequest,
    EnvOpened,
    EnvSpec,
    OpenEnv,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
    decode_env,
    encode_env,
)
from penstock.shared.protocol.messages import Heartbeat
from penstock.shared.transport import env_client
from penstock.shared.transport.bulk_message import FrameMail
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.env_client import EnvClient
from penstock.shared.transport.server import NatsServer
from penstock.shared.transport.unix_socket import UnixServer
from tests.contract.simulated_envs import FOLDER

JOB = "job_env_test"


@asynccontextmanager
async def run_env(bus: Bus) -> AsyncIterator[EnvService]:
    service = EnvService(bus, ServiceSettings())
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def open_session(bus: Bus, within_s: float = 30.0, **request: object) -> EnvOpened:
    data = pack(OpenEnv(**{"env_id": "CartPole-v1", "num_envs": 2, **request}), job=JOB)  # type: ignore[arg-type]
    async with asyncio.timeout(within_s):
        while True:
            try:
                reply = await bus.request(subjects.ENV_OPEN, data, deadline_s=within_s)
            except Unavailable:
                await asyncio.sleep(0.02)
            else:
                return unpack(reply, EnvOpened)[0]


class Client:
    """Client that sends the requests of one session in order."""

    def __init__(self, bus: Bus, opened: EnvOpened) -> None:
        self.bus, self.subject, self.seq = bus, subjects.env(opened.session), 0

    async def reset(self, *states: int) -> ResetReply:
        envs = np.arange(len(states), dtype=np.int32)
        body = ResetRequest(seq=self.seq, env_ids=envs, state_ids=np.asarray(states, np.int64))
        return decode_env(await self.send(encode_env(body)), ResetReply)

    def step_request(self, *actions: int) -> bytes:
        envs, empty = np.arange(len(actions), dtype=np.int32), np.zeros(0, np.int64)
        chunk = np.asarray(actions, np.int64)[:, None]
        return encode_env(StepRequest(seq=self.seq, auto_reset=True, env_ids=envs, actions=chunk, next_state_ids=empty))

    async def step(self, *actions: int) -> StepReply:
        return decode_env(await self.send(self.step_request(*actions)), StepReply)

    async def send(self, data: bytes) -> bytes:
        reply = await self.bus.request(self.subject, data, deadline_s=5)
        self.seq += 1
        return reply

    async def close(self) -> None:
        decode_env(await self.bus.request(self.subject, encode_env(CloseRequest(seq=0)), deadline_s=5), CloseRequest)


async def test_episodes_over_the_bus_equal_episodes_in_place(bus: Bus) -> None:
    """A simple controller balances two poles; each observation equals that of Gymnasium with the same seed."""
    async with run_env(bus) as service:
        opened = await open_session(bus)
        assert (opened.spec.observations["state"].shape, opened.spec.num_actions) == ((4,), 2)
        client = Client(bus, opened)
        local = [gymnasium.make("CartPole-v1") for _ in range(2)]
        expected = np.stack([env.reset(seed=seed)[0] for env, seed in zip(local, (3, 4), strict=True)])
        observations = (await client.reset(3, 4)).observations["state"]
        ended = np.zeros(2, np.bool_)
        for _ in range(120):
            assert np.array_equal(observations, expected)
            actions = [int(o[2] + 0.3 * o[3] > 0) for o in observations]
            reply = await client.step(*actions)
            steps = [env.step(action) for env, action in zip(local, actions, strict=True)]
            expected = np.stack([step[0] for step in steps])
            observations, ended = reply.observations["state"], reply.ended
            assert reply.rewards[:, 0].tolist() == [step[1] for step in steps]
            assert ended.tolist() == [step[2] or step[3] for step in steps]
            if ended.any():
                break
        assert reply.lengths.min() > 100, "the controller keeps the poles up"
        assert service.status() == {JOB: {"sessions": 1, "envs": 2, "steps": 240, "episodes": 0, "lost": 0}}
        await client.close()
        await eventually(lambda: not_serving(bus, client))
        await eventually(lambda: forgotten(service))  # the simulator is closed after the last answer
        for env in local:
            env.close()


async def not_serving(bus: Bus, client: Client) -> bool:
    try:
        await bus.request(client.subject, encode_env(CloseRequest(seq=0)), deadline_s=2)
    except Unavailable:
        return True
    return False


async def forgotten(service: EnvService) -> bool:
    await asyncio.sleep(0.01)
    return service.status() == {}


async def eventually(holds: Callable[[], Awaitable[bool]], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.05)


async def test_repeated_request_is_answered_but_not_executed_again(bus: Bus) -> None:
    async with run_env(bus) as service:
        client = Client(bus, await open_session(bus))
        await client.reset(1, 2)
        request = client.step_request(0, 1)
        answers = [await bus.request(client.subject, request, deadline_s=5) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert service.status()[JOB]["steps"] == 2
        with pytest.raises(Conflict, match="request 5 after request 1"):
            client.seq = 5
            await client.step(0, 1)


async def test_refusals_reach_the_client_and_do_not_count(bus: Bus) -> None:
    async with run_env(bus):
        with pytest.raises(ConfigError, match="'NoSuchTask-v1' of gymnasium: environment cannot be made"):
            await open_session(bus, env_id="NoSuchTask-v1")
        client = Client(bus, await open_session(bus))
        await client.reset(1, 2)
        with pytest.raises(ProtocolError, match=r"must lie in 0\.\.1"):
            await client.step(0, 7)
        with pytest.raises(ProtocolError):
            await bus.request(client.subject, b"rubbish", deadline_s=5)
        assert (await client.step(0, 1)).lengths.tolist() == [1, 1]


async def test_idle_session_is_closed(bus: Bus) -> None:
    async with run_env(bus) as service:
        client = Client(bus, await open_session(bus, idle_s=0.3))
        await client.reset(1, 2)
        assert service.sessions

        async def gone() -> bool:
            return not service.sessions

        await eventually(gone)
        with pytest.raises(Unavailable, match="nobody serves"):
            await client.step(0, 1)


async def test_process_registers_serves_and_drains(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    """Also checks that the log of the process is in the folder from which the API reads it."""
    beats: asyncio.Queue[Heartbeat] = asyncio.Queue(1000)
    await bus.subscribe(subjects.HEARTBEATS, lambda _, data: beats.put_nowait(unpack(data, Heartbeat)[0]))
    env = {**os.environ, "PENSTOCK_NATS_URL": nats_server.url, "PENSTOCK_HEARTBEAT_S": "0.1"}
    env |= {"PENSTOCK_LOG_FILES": "1", "PENSTOCK_DATA_DIR": str(tmp_path), "PENSTOCK_WORKER_ID": "0a1b2c-7"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock.services.env", env=env)
    try:
        client = Client(bus, await open_session(bus, within_s=30))
        await client.reset(1, 2)
        for _ in range(5):
            await client.step(0, 1)
        await eventually(lambda: beaten(beats, steps=10))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = read_logs(tmp_path / "logs", job=JOB, service="env", tail=100, after=None)
    assert {line["worker"] for line in found["lines"]} == {"env-0a1b2c-7"}
    assert any('"drained"' in line["text"] for line in found["lines"])


async def beaten(beats: asyncio.Queue[Heartbeat], *, steps: int) -> bool:
    """Return True if a heartbeat of a ready env process that executed ``steps`` steps has arrived."""
    seen = [beats.get_nowait() for _ in range(beats.qsize())]
    return any(b.service == "env" and b.ready and b.jobs.get(JOB, {}).get("steps") == steps for b in seen)


async def test_slow_environments_are_created_once(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_client, "ATTEMPT_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    made = tmp_path / "made"
    settings = ServiceSettings(shm_dir=tmp_path)
    async with run_env(bus) as service:
        async with asyncio.timeout(30):
            while not service.ready:
                await asyncio.sleep(0.02)
        with FrameMail(settings) as mail:
            request = OpenEnv(env_id="simulated_envs:Slow-v0", num_envs=1, options={"made": str(made)})
            client = await EnvClient.open(bus, mail, request, job=JOB)
            assert (len(service.sessions), made.read_text()) == (1, "made\n")
            await client.close()


async def test_a_simulator_is_described_and_closed(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", FOLDER)

    async def describe(**keys: object) -> EnvSpec:
        data = pack(OpenEnv(**{"num_envs": 1, **keys}), job=JOB)  # type: ignore[arg-type]
        return unpack(await bus.request(subjects.ENV_DESCRIBE, data, deadline_s=60), EnvSpec)[0]

    def children() -> list[psutil.Process]:
        found = psutil.Process().children(recursive=True)
        return [child for child in found if any(word.endswith("simulators/child.py") for word in child.cmdline())]

    async with run_env(bus) as service:
        await eventually(lambda: ready(service))
        spec = await describe(env_id="reach-v3", backend="metaworld")
        assert (spec.observations["state"].shape, spec.action_shape, spec.has_success) == ((39,), (4,), True)
        assert (service.sessions, children()) == ({}, [])
        with pytest.raises(ConfigError, match="'NoSuchTask-v1' of gymnasium: environment cannot be made"):
            await describe(env_id="NoSuchTask-v1")
        with pytest.raises(ConfigError, match="'simulated_envs:Slow-v0' of gymnasium: no episode begins"):
            await describe(env_id="simulated_envs:Slow-v0", options={"made": os.devnull})
        with pytest.raises(ConfigError, match="the first step of an episode fails: KeyError: 'joint'"):
            await describe(env_id="simulated_envs:Stuck-v0")
        assert children() == []


async def ready(service: EnvService) -> bool:
    return service.ready


@pytest.mark.long
async def test_keepalives_of_a_client_extend_its_session(bus: Bus, tmp_path: Path) -> None:
    """A keepalive does not advance the sequence number of requests."""
    async with run_env(bus) as service:
        await eventually(lambda: ready(service))
        with FrameMail(ServiceSettings(shm_dir=tmp_path)) as mail:
            request = OpenEnv(env_id="CartPole-v1", num_envs=1, idle_s=1.5)
            client = await EnvClient.open(bus, mail, request, job=JOB)
            ends = time.monotonic() + 2 * request.idle_s
            while time.monotonic() < ends:
                await client.keep()
                await asyncio.sleep(0.05)
            reset = ResetRequest(seq=client.seq, env_ids=np.zeros(1, np.int32), state_ids=np.ones(1, np.int64))
            assert (await client.reset(reset)).seq == 0
            await eventually(lambda: forgotten(service))


async def test_a_client_soon_notices_that_nobody_serves_its_session(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client notices long before the deadline of a step, which a slow simulator may need."""
    monkeypatch.setattr(env_client, "GONE_S", 0.3)
    with FrameMail(ServiceSettings(shm_dir=tmp_path)) as mail:
        async with run_env(bus):
            async with asyncio.timeout(30):
                client = await EnvClient.open(bus, mail, OpenEnv(env_id="CartPole-v1", num_envs=1), job=JOB)
        with pytest.raises(Unavailable):
            async with asyncio.timeout(30):
                await client.keep()
        reset = ResetRequest(seq=0, env_ids=np.zeros(1, np.int32), state_ids=np.ones(1, np.int64))
        with pytest.raises(Unavailable):
            async with asyncio.timeout(30):
                await client.reset(reset, deadline_s=600)


async def test_requests_of_the_same_host_do_not_pass_through_the_bus(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the socket fails, the client repeats the request over the bus; the service does not execute it again."""
    async with run_env(bus) as service:
        await eventually(lambda: ready(service))
        with FrameMail(ServiceSettings(shm_dir=tmp_path)) as mail:
            client = await EnvClient.open(bus, mail, OpenEnv(env_id="CartPole-v1", num_envs=1), job=JOB)
            passed: list[str] = []
            await bus.subscribe(client.subject, lambda subject, _: passed.append(subject))
            one = np.zeros(1, np.int32)
            await client.reset(ResetRequest(seq=0, env_ids=one, state_ids=np.ones(1, np.int64)))

            def step() -> Awaitable[StepReply]:
                return client.step(
                    StepRequest(seq=client.seq, auto_reset=False, env_ids=one, actions=np.zeros((1, 1), np.int64),
                                next_state_ids=np.zeros(0, np.int64))
                )  # fmt: skip

            await step()
            await client.keep()
            assert client.is_direct and not passed
            (served,) = service.sessions.values()
            message, direct = served._message, client._direct
            assert direct is not None

            async def lost() -> bytes:
                """Execute the request, and lose its reply."""
                reply = await message()
                direct.close()
                return reply

            monkeypatch.setattr(served, "_message", lost)
            assert (await step()).seq == client.seq - 1
            assert not client.is_direct and passed
            assert service.status()[JOB]["steps"] == 2
            await client.close()
            await eventually(lambda: forgotten(service))


@pytest.mark.long
@pytest.mark.parametrize("reason", ["another host", "another network namespace"])
async def test_requests_that_no_socket_takes_go_by_the_bus(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "another host":
        settings = ServiceSettings(shm_dir=tmp_path, host_id="elsewhere")
    else:
        settings = ServiceSettings(shm_dir=tmp_path)
        monkeypatch.setattr(UnixServer, "start", no_start)
    async with run_env(bus) as service:
        await eventually(lambda: ready(service))
        with FrameMail(settings) as mail:
            client = await EnvClient.open(bus, mail, OpenEnv(env_id="CartPole-v1", num_envs=1), job=JOB)
            assert not client.is_direct
            request = ResetRequest(seq=0, env_ids=np.zeros(1, np.int32), state_ids=np.ones(1, np.int64))
            assert (await client.reset(request)).seq == 0
            await client.close()


async def test_observations_on_the_same_host_are_read_from_shared_memory(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observations equal those that another client gets in replies: for all rows and for some, also after kills."""
    monkeypatch.setattr(session, "INLINE_BYTES", 0)
    elsewhere = ServiceSettings(shm_dir=tmp_path, host_id="elsewhere")
    async with run_env(bus) as service:
        await eventually(lambda: ready(service))
        with FrameMail(ServiceSettings(shm_dir=tmp_path)) as near, FrameMail(elsewhere) as far:
            request = OpenEnv(env_id="CartPole-v1", num_envs=4, num_processes=2, options={"max_episode_steps": 3})
            clients = [await EnvClient.open(bus, mail, request, job=JOB) for mail in (near, far)]
            assert [client.is_mapped for client in clients] == [True, False]
            everyone, some = np.arange(4, dtype=np.int32), np.asarray([3, 1], np.int32)

            async def compare(ask: Callable[[EnvClient], Awaitable[StepReply | ResetReply]]) -> StepReply | ResetReply:
                one, other = [await ask(client) for client in clients]
                np.testing.assert_array_equal(one.observations["state"], other.observations["state"])
                return one

            def step(ids: np.ndarray, *, auto_reset: bool = False) -> Callable[[EnvClient], Awaitable[StepReply]]:
                return lambda client: client.step(
                    StepRequest(seq=client.seq, auto_reset=auto_reset, env_ids=ids,
                                actions=np.ones((len(ids), 1), np.int64), next_state_ids=np.zeros(0, np.int64))
                )  # fmt: skip

            first = await compare(
                lambda client: client.reset(ResetRequest(seq=0, env_ids=everyone, state_ids=np.arange(4)))
            )
            assert first.observations["state"].any(axis=1).all()
            await compare(step(everyone))
            await compare(step(some))
            ended = await compare(step(some, auto_reset=True))
            assert isinstance(ended, StepReply) and ended.ended.all()
            assert not np.array_equal(ended.final_observations["state"], ended.observations["state"])
            for child in psutil.Process().children():
                if any("simulators/child.py" in word for word in child.cmdline()):
                    child.kill()
            lost = await compare(step(some))
            assert isinstance(lost, StepReply) and lost.lost.all()
            assert not lost.observations["state"].any()
            again = np.asarray([1, 3], np.int32)
            await compare(
                lambda client: client.reset(ResetRequest(seq=client.seq, env_ids=again, state_ids=np.arange(2)))
            )
            for client in clients:
                await client.close()


@pytest.mark.long
@pytest.mark.parametrize("wrong", [{"inode": 1}, {"size": 1}, {"descriptor": 1 << 20}])
async def test_shared_memory_of_another_process_is_not_read(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, int]
) -> None:
    """In another container, the same process id may belong to another process."""
    monkeypatch.setattr(session, "INLINE_BYTES", 0)
    true = ProcessSimulator.memory.fget
    assert true is not None
    monkeypatch.setattr(ProcessSimulator, "memory", property(lambda self: msgspec.structs.replace(true(self), **wrong)))
    async with run_env(bus) as service:
        await eventually(lambda: ready(service))
        with FrameMail(ServiceSettings(shm_dir=tmp_path)) as mail:
            client = await EnvClient.open(bus, mail, OpenEnv(env_id="CartPole-v1", num_envs=1), job=JOB)
            assert not client.is_mapped
            request = ResetRequest(seq=0, env_ids=np.zeros(1, np.int32), state_ids=np.ones(1, np.int64))
            assert (await client.reset(request)).observations["state"].any()
            await client.close()


async def no_start(server: UnixServer) -> None:
    """Do not start the server, so that no socket is reachable."""


async def test_a_partial_reply_is_not_read_in_the_event_loop() -> None:
    """Nor is one whose sender died: the event loop would wait for the rest, and block all other sessions."""
    for cut in (1, 8, 50):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.settimeout(10)
            Channel(theirs).send({"lost": {}}, np.zeros(3))
            whole = ours.recv(1 << 16)
            theirs.sendall(whole[:cut])
            assert not await _readable([ours], time.monotonic() + 60)
            theirs.sendall(whole[cut:])
            assert await _readable([ours], time.monotonic() + 60)
            assert Channel(ours).receive() is not None
            theirs.sendall(whole[:cut])
            theirs.close()
            assert not await _readable([ours], time.monotonic() + 60)
