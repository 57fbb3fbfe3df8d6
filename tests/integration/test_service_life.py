"""The life of a service process: start, health, heartbeats, drain, exit codes. Real processes, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.messages import Heartbeat
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

PROGRAM = """
import asyncio, sys, threading, time
from penstock.shared.runtime.service import run_service

MODE = sys.argv[1]

class Toy:
    name = "toy"

    def __init__(self, bus, settings):
        self.ready = False

    async def run(self):
        self.ready = True
        if MODE == "ends":
            return
        if MODE == "breaks":
            threading.Thread(target=time.sleep, args=(600,)).start()  # must not hold up the end
            raise RuntimeError("a bug")
        await asyncio.Event().wait()

    async def drain(self):
        self.ready = False
        await asyncio.sleep(30 if MODE == "hangs" else 0.1)
        print("everything finished", flush=True)

    def status(self):
        return {"job_1": {"version": 3}}

run_service(Toy)
"""


SMALL = {"PENSTOCK_EXPERIENCE_BYTES": str(8 << 20), "PENSTOCK_STREAM_BYTES": str(4 << 20)}
"""The first service creates the streams; the servers of the tests may have little room."""


class Toy:
    """Process that runs ``PROGRAM``."""

    def __init__(self, directory: Path, mode: str, **env: str) -> None:
        self.log = directory / "toy.log"
        program = directory / "toy.py"
        program.write_text(PROGRAM)
        settings = {f"PENSTOCK_{key.upper()}": value for key, value in env.items()}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(program), mode],
                env={**os.environ, "PENSTOCK_WORKER_ID": "toy-0", "PENSTOCK_HEARTBEAT_S": "0.1", **SMALL, **settings},
                stdout=log,
                stderr=log,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    async def port(self) -> int:
        return int((await self.line(r"health on http://127\.0\.0\.1:(\d+)")).group(1))

    async def line(self, pattern: str) -> re.Match[str]:
        for _ in range(400):
            if found := re.search(pattern, self.text):
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"no '{pattern}' within 8 s in: {self.text}")

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)


@pytest.fixture
def toys() -> Iterator[list[Toy]]:
    started: list[Toy] = []
    yield started
    for toy in started:
        toy.process.kill()
        toy.process.wait()


async def fetch(port: int, path: str) -> tuple[int, str]:
    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def test_a_service_beats_answers_and_drains(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, toys: list[Toy]
) -> None:
    beats: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe("heartbeat.toy.>", lambda _, data: beats.put_nowait(data))
    toy = Toy(tmp_path, "serves", nats_url=nats_server.url)
    toys.append(toy)
    port = await toy.port()
    while True:
        beat, _ = unpack(await asyncio.wait_for(beats.get(), 8), Heartbeat)
        if beat.ready:
            break
    assert (beat.service, beat.worker, beat.pid) == ("toy", "toy-0", toy.process.pid)
    assert (beat.health_port, beat.jobs) == (port, {"job_1": {"version": 3}})
    assert "torch" in (beat.packages or []), "the installed packages that a job may need"
    assert (await fetch(port, "/healthz"))[0] == 200
    assert (await fetch(port, "/readyz"))[0] == 200
    status, text = await fetch(port, "/metrics")
    assert status == 200
    assert "penstock_bus_connected 1.0" in text
    toy.process.send_signal(signal.SIGTERM)
    assert await toy.exit_code() == 0
    async with asyncio.timeout(30):
        while unpack(await beats.get(), Heartbeat)[0].ready:
            pass  # the last heartbeat of a drained service has ready=False
    assert "everything finished" in toy.text
    lines = [json.loads(line) for line in toy.text.splitlines() if line.startswith("{")]
    assert {(line["service"], line["worker"]) for line in lines} == {("toy", "toy-0")}


@pytest.mark.long
@pytest.mark.usefixtures("bus")
async def test_readiness_follows_the_bus(nats_server: NatsServer, tmp_path: Path, toys: list[Toy]) -> None:
    nats_server.kill()
    toy = Toy(tmp_path, "serves", nats_url=nats_server.url)
    toys.append(toy)
    port = await toy.port()
    status, text = await fetch(port, "/readyz")
    assert status == 503
    assert f"the bus at {nats_server.url}" in text
    nats_server.start()
    for ready in (200, 503):
        for _ in range(200):
            if (await fetch(port, "/readyz"))[0] == ready:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError(f"/readyz did not become {ready}")
        nats_server.kill()
    assert (await fetch(port, "/healthz"))[0] == 200, "a lost bus is no reason to restart the process"
    toy.process.send_signal(signal.SIGINT)
    assert await toy.exit_code() == 0


@pytest.mark.long
async def test_a_signal_while_waiting_for_the_bus_ends_at_once(tmp_path: Path, toys: list[Toy]) -> None:
    toy = Toy(tmp_path, "serves", nats_url="nats://127.0.0.1:1")
    toys.append(toy)
    await toy.port()
    start = time.monotonic()
    toy.process.send_signal(signal.SIGTERM)
    assert await toy.exit_code() == 0
    assert time.monotonic() - start < 10


@pytest.mark.long
@pytest.mark.usefixtures("bus")
async def test_a_drain_that_hangs_is_ended(nats_server: NatsServer, tmp_path: Path, toys: list[Toy]) -> None:
    toy = Toy(tmp_path, "hangs", nats_url=nats_server.url, drain_s="0.3")
    toys.append(toy)
    port = await toy.port()
    for _ in range(200):
        if (await fetch(port, "/readyz"))[0] == 200:
            break
        await asyncio.sleep(0.02)
    toy.process.send_signal(signal.SIGTERM)
    assert await toy.exit_code() == 1
    assert "waited 0.3 s for drain" in toy.text


@pytest.mark.long
@pytest.mark.usefixtures("bus")
@pytest.mark.parametrize(("mode", "code"), [("ends", 0), ("breaks", 1)])
async def test_the_end_of_the_service_is_the_exit_code(
    nats_server: NatsServer, tmp_path: Path, toys: list[Toy], mode: str, code: int
) -> None:
    toy = Toy(tmp_path, mode, nats_url=nats_server.url)
    toys.append(toy)
    assert await toy.exit_code() == code
    assert ("RuntimeError: a bug" in toy.text) == (mode == "breaks")


@pytest.mark.parametrize(
    ("env", "message"),
    [({"drain_s": "soon"}, "PENSTOCK_DRAIN_S"), ({"nats_url": "nats://host:port"}, "not a NATS address")],
)
async def test_wrong_settings_exit_with_two(tmp_path: Path, toys: list[Toy], env: dict[str, str], message: str) -> None:
    toy = Toy(tmp_path, "serves", **env)
    toys.append(toy)
    assert await toy.exit_code() == 2
    assert message in toy.text
