"""Scaling of a running stack up and down: failed starts, stops, and late requests."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import psutil
import pytest

from penstock.local import Stack, StackOptions, read_state
from penstock.local.child import KeptAlive, ServiceProcess
from penstock.local.launch import Launch
from penstock.local.leash import leashed
from penstock.local.ports import free_ports
from penstock.local.stack import SERVICES, Supervisor
from penstock.services.coordinator.jobs.scaling import Scaler
from penstock.services.coordinator.jobs.store import JobStore
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import Conflict, DeadlineError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.jobs import Operation
from penstock.shared.protocol.scaling import ScaleReply, ScaleRequest
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

NOBODY = ScaleReply(replicas=0, ready=0, leaving=0)
JOB = {
    "name": "addition",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 4},
    "train": {"batch_size": 8, "max_updates": 3},
}


def sleeper(module: str, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that sleeps, in place of a service."""
    return subprocess.Popen(leashed(["sleep", "600"]), stdout=log, stderr=log, start_new_session=True)


def bare(directory: Path, nats_url: str, launch: Launch = sleeper) -> Stack:
    """Return a stack without services."""
    workers = dict.fromkeys(SERVICES, 0)
    redis_url = f"redis://127.0.0.1:{free_ports(1)[0]}"
    return Stack(
        StackOptions(data_dir=directory, nats_url=nats_url, redis_url=redis_url, workers=workers, launch=launch)
    )


async def test_a_worker_that_did_not_start_blocks_no_other(nats_server: NatsServer, tmp_path: Path) -> None:
    failures = [OSError(12, "Cannot allocate memory")]

    def reluctant(module: str, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        if failures:
            raise failures.pop()
        return sleeper(module, environment, log)

    async with bare(tmp_path, nats_server.url, reluctant) as stack:
        with pytest.raises(OSError, match="Cannot allocate"):
            await stack.scale("rollout", 1)
        assert (stack.processes, await stack.pool("rollout")) == ({}, NOBODY)
        await stack.scale("rollout", 2)
        first, second = stack.processes["rollout-0"], stack.processes["rollout-1"]
        await stack.scale("rollout", 1)
        async with asyncio.timeout(30):
            while await stack.pool("rollout") != ScaleReply(replicas=1, ready=0, leaving=0):
                await asyncio.sleep(0.02)
        assert not psutil.pid_exists(second)
        await stack.scale("rollout", 0)
    assert not psutil.pid_exists(first)


async def test_a_worker_that_could_not_be_stopped_is_tried_again(nats_server: NatsServer, tmp_path: Path) -> None:
    refusals: list[OSError] = []
    started: list[subprocess.Popen[bytes]] = []

    class Reluctant(subprocess.Popen[bytes]):
        def terminate(self) -> None:
            if refusals:
                raise refusals.pop()
            super().terminate()

    def launch(module: str, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        started.append(Reluctant(leashed(["sleep", "600"]), stdout=log, stderr=log, start_new_session=True))
        return started[-1]

    async def until(replicas: int) -> None:
        async with asyncio.timeout(30):
            while await stack.pool("rollout") != ScaleReply(replicas=replicas, ready=0, leaving=0):
                await asyncio.sleep(0.02)

    stack = bare(tmp_path, nats_server.url, launch)
    with pytest.raises(PermissionError, match="at the end"):
        async with stack:
            await stack.scale("rollout", 2)
            refusals.append(PermissionError("not now"))
            await stack.scale("rollout", 1)
            await until(2)
            await stack.scale("rollout", 1)
            await until(1)
            refusals.append(PermissionError("at the end"))
    assert read_state(tmp_path) is None
    assert stack.processes == {}
    for process in started:
        process.kill()
        process.wait()


async def test_a_start_that_is_cancelled_ends_before_its_process_is_stopped(tmp_path: Path) -> None:
    begun, released = threading.Event(), threading.Event()

    def slow(module: str, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        begun.set()
        released.wait(60)
        return sleeper(module, environment, log)

    child = ServiceProcess("rollout", "rollout-0", environment={}, log_dir=tmp_path, launch=slow)
    with ThreadPoolExecutor(1) as starter:
        kept = KeptAlive(child, starter, lambda _: None)
        start = asyncio.create_task(kept.start())
        await asyncio.to_thread(begun.wait, 30)
        start.cancel()
        try:
            await asyncio.wait([start], timeout=0.1)
            assert not start.done()
        finally:
            released.set()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert child.running
        await kept.stop(5)


async def test_workers_may_come_while_a_stack_is_not_ready_yet(nats_server: NatsServer, tmp_path: Path) -> None:
    async with bare(tmp_path, nats_server.url) as stack:

        async def not_ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await stack.scale("rollout", 1)
            writer.write(b"HTTP/1.1 503 Not yet\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(not_ready, "127.0.0.1", int(stack.url.rpartition(":")[2])):
            with pytest.raises(DeadlineError, match="not ready after"):
                await stack.ready(deadline_s=0)
        assert "rollout-0" in stack.processes


class Counted:
    """``Scalable`` that scales at once."""

    def __init__(self) -> None:
        self.replicas = 1

    async def scale(self, service: str, replicas: int) -> None:
        self.replicas = replicas

    async def pool(self, service: str) -> ScaleReply:
        return ScaleReply(replicas=self.replicas, ready=self.replicas, leaving=0)


def operation(number: int, replicas: int) -> Operation:
    args = {"pool": "rollout", "replicas": replicas}
    return Operation(id=f"op_{number:032x}", kind="scale", created_at=datetime.now(UTC), args=args)


async def test_a_request_that_comes_late_undoes_no_newer_one(nats_server: NatsServer, bus: Bus) -> None:
    processes, store = Counted(), JobStore(bus)
    job = (await store.create(JobConfig.model_validate(JOB))).id

    async def ask(operation: str, replicas: int | None) -> ScaleReply:
        request = ScaleRequest(pool="rollout", replicas=replicas, operation=operation)
        return unpack(await bus.request(subjects.SCALE, pack(request), deadline_s=30), ScaleReply)[0]

    async def ended(id: str) -> tuple[str, str]:
        async with asyncio.timeout(30):
            while (found := {one.id: one for one in (await store.get(job)).operations}[id]).state == "pending":
                await asyncio.sleep(0.02)
        return found.state, found.message

    supervisor = asyncio.create_task(Supervisor(nats_server.url, processes).run())
    scaler = asyncio.create_task(Scaler(bus, store).run())
    try:
        async with asyncio.timeout(30):
            while True:
                with suppress(Unavailable):
                    await ask("", None)
                    break
                await asyncio.sleep(0.02)
        await store.begin_operation(job, operation(2, 4))
        assert await ended(operation(2, 4).id) == ("succeeded", "")
        with pytest.raises(Conflict, match="newer request"):
            await ask(operation(1, 0).id, 0)
        assert (await ask(operation(2, 4).id, 4)).replicas == processes.replicas == 4
        await ask(operation(9, 5).id, 5)
        await store.begin_operation(job, operation(3, 1))
        state, message = await ended(operation(3, 1).id)
        assert (state, processes.replicas) == ("failed", 5)
        assert "newer request" in message
    finally:
        supervisor.cancel()
        scaler.cancel()
        await asyncio.gather(supervisor, scaler, return_exceptions=True)
