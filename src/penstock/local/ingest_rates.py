"""Benchmark of durable feedback per second over HTTP: nats-server, coordinator and load are separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from penstock.local.load import Plan, Result
from penstock.local.ports import free_ports
from penstock.shared.errors import ConfigError, DeadlineError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.live.interaction import FeedbackBatch, new_marked_id
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

__all__ = ["BATCH", "SINGLE", "Front", "Losses", "kill_test", "load_name", "measure"]

SINGLE, BATCH = "/v1/feedback", "/v1/feedback/batch"
READY_S = 60.0
LONGEST_S = 600.0
BETWEEN_KILLS = 500
"""Acknowledged items between two kills, if items are posted singly; KILL_BATCHES times as many with batches."""
KILL_BATCHES = 20
ID_BYTES = 37
JOB = {
    "kind": "online_rl",
    "name": "ingest",
    "model": {"config": {"hidden_size": 64}, "tokenizer": "char"},
    "online": {"metrics": {"accepted": {"type": "boolean"}}},
}
_WRK_LATENCY = re.compile(r"^\s+(50|99)%\s+([\d.]+)(us|ms|s)", re.MULTILINE)
_WRK_COUNT = re.compile(r"(\d+) requests in ([\d.]+)(s|m)")
_WRK_BAD = re.compile(r"Non-2xx or 3xx responses: (\d+)")
_WRK_ERRORS = re.compile(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)")
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


class Front:
    """A coordinator that accepts feedback for one online job, on a nats-server that syncs every message to disk."""

    def __init__(self, directory: Path, **variables: str) -> None:
        """Prepare the servers. ``variables``: more settings of the coordinator, without the prefix ``PENSTOCK_``."""
        self.directory, self._variables = directory, variables
        self.nats = NatsServer(directory / "nats")
        self.port = 0
        self.job = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Front:
        self.nats.start()
        self.port = free_ports(1)[0]
        self.start()
        key = self._variables.get("API_KEYS", "").partition(",")[0]
        self.job = _request("POST", f"{self.url}/v1/jobs", JOB, key)["id"]
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.nats.close()

    @property
    def url(self) -> str:
        """URL of the API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the coordinator."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the coordinator and wait until it is ready. Raises DeadlineError."""
        own = {
            "NATS_URL": self.nats.url, "NATS_MONITOR_URL": self.nats.monitor_url, "HTTP_HOST": "127.0.0.1",
            "HTTP_PORT": str(self.port), "DATA_DIR": str(self.directory / "data"), "LIVE_RATE_LIMIT": "9999999/minute",
            "LOG_LEVEL": "warning", "API_KEYS": "", "OPEN_LOOPBACK": "true", "WORKER_ID": "bench",
            **self._variables,
        }  # fmt: skip
        environment = {**os.environ, **{f"PENSTOCK_{name}": value for name, value in own.items()}}
        environment.pop("PENSTOCK_REDIS_URL", None)
        with (self.directory / "coordinator.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.services.coordinator"], env=environment, stdout=log, stderr=log
            )
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the coordinator can store feedback. Raises DeadlineError."""
        end = time.monotonic() + READY_S
        while not _is_ready(f"{self.url}/readyz"):
            if time.monotonic() > end or (self._process is not None and self._process.poll() is not None):
                raise DeadlineError(f"the coordinator did not become ready; see {self.directory / 'coordinator.log'}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the coordinator with SIGKILL, like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def item(self) -> dict[str, Any]:
        """Return a valid feedback item on a made-up response of this job."""
        return {"inference_id": new_marked_id(self.job), "metric_name": "accepted", "value": True}

    def plan(self, *, batch: int, connections: int, seconds: float, acked: str = "") -> Plan:
        """Return a plan of requests with ``batch`` items each. 0: each request posts one item, without the batch
        format.

        ``acked``: file to which the ids of acknowledged items are written; '': none.
        """
        body = json.dumps([self.item() for _ in range(batch)] if batch else self.item())
        return Plan(
            host="127.0.0.1", port=self.port, path=BATCH if batch else SINGLE, body=body, connections=connections,
            seconds=seconds, items=max(1, batch), acked=acked,
        )  # fmt: skip


def load_name() -> str:
    """Return the name of the load generator: wrk if it is installed, otherwise Penstock's own."""
    return "wrk" if shutil.which("wrk") else "Python sockets in a process of their own (wrk is not installed)"


def measure(plan: Plan) -> Result:
    """Run the load of ``plan`` for the duration in it, and return the result. Raises ConfigError if the load fails."""
    if shutil.which("wrk") and not plan.acked:
        return _wrk(plan)
    with begun(plan) as process:
        return ended(process, plan)


@contextmanager
def begun(plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """Start a load in a separate process. At the end of the context, kill the process if it still runs."""
    command = [sys.executable, "-m", "penstock.local.load"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(plan))
    process.stdin.close()
    process.stdin = None
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def ended(process: subprocess.Popen[bytes], plan: Plan) -> Result:
    """Wait for the end of a load and return its result."""
    output, _ = process.communicate(timeout=plan.seconds + READY_S)
    if process.returncode:
        raise ConfigError("the load broke off; is the machine short of file descriptors?")
    return msgspec.json.decode(output, type=Result)


class Losses(msgspec.Struct, kw_only=True):
    """Counts of items in a kill test. ``lost``: acknowledged, but not stored; ``repeated``: stored more than once
    (surplus copies)."""

    acked: int
    stored: int
    lost: int
    repeated: int
    errors: int
    kills: list[str]


def kill_test(front: Front, *, connections: int, kills: int = 4, batch: int = 0) -> Losses:
    """Run a load while killing the coordinator and nats-server in turn; then look for every acknowledged item.

    ``batch``: items in each request; 0: single items.
    """
    acked, between = front.directory / f"acked-{batch}", BETWEEN_KILLS * (KILL_BATCHES if batch else 1)
    acked.touch()
    plan = front.plan(batch=batch, connections=connections, seconds=LONGEST_S, acked=str(acked))
    killed = []
    with begun(plan) as process:
        for turn in range(kills):
            _grown(acked, between)
            killed.append(("coordinator", "nats")[turn % 2])
            if killed[-1] == "nats":
                front.nats.restart()
            else:
                front.kill()
                front.start()
        _grown(acked, between)
        process.terminate()
        result = ended(process, plan)
    front.wait_ready()
    known = [line.decode() for line in acked.read_bytes().split()]
    stored = asyncio.run(_stored(front.nats.url))
    return Losses(
        acked=len(known), stored=len(stored), lost=len(set(known) - set(stored)),
        repeated=len(stored) - len(set(stored)), errors=result.errors, kills=killed,
    )  # fmt: skip


def _grown(acked: Path, items: int) -> None:
    """Wait until the file ``acked``, which has the ids of acknowledged items, has grown by ``items`` ids. Raises
    DeadlineError."""
    end, size = time.monotonic() + READY_S, acked.stat().st_size + items * ID_BYTES
    while acked.stat().st_size < size:
        if time.monotonic() > end:
            raise DeadlineError(f"fewer than {items} items were acknowledged within {READY_S:g} s")
        time.sleep(0.01)


async def _stored(url: str) -> list[str]:
    """Return the ids of all items in FEEDBACK, read from the stream itself."""
    async with await Bus.connect(url, name="bench") as bus:
        found: list[str] = []
        async with contextlib.aclosing(bus.scan(subjects.FEEDBACK, subjects.feedback("*"))) as messages:
            async for message in messages:
                found += [item.id for item in unpack(message.data, FeedbackBatch)[0].items]
        return found


def _wrk(plan: Plan) -> Result:
    script = f"wrk.method='POST'\nwrk.headers['Content-Type']='application/json'\nwrk.body=[==[{plan.body}]==]\n"
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = ["wrk", "-t1", f"-c{plan.connections}", f"-d{plan.seconds:g}s", "--timeout", "10s", "--latency"]
        command += ["-s", file.name, f"http://{plan.host}:{plan.port}{plan.path}"]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    count = _WRK_COUNT.search(output)
    if count is None:
        raise ConfigError(f"wrk said nothing that could be read:\n{output}")
    bad = int(found[1]) if (found := _WRK_BAD.search(output)) else 0
    errors = sum(map(int, found.groups())) if (found := _WRK_ERRORS.search(output)) else 0
    times = {name: float(value) * _MS[unit] for name, value, unit in _WRK_LATENCY.findall(output)}
    requests, elapsed = int(count[1]) - bad, float(count[2]) * {"s": 1, "m": 60}[count[3]]
    return Result(
        requests=requests, items_per_s=requests * plan.items / elapsed, p50_ms=times["50"], p99_ms=times["99"],
        statuses={"2xx": requests, "other": bad}, errors=errors, seconds=elapsed,
    )  # fmt: skip


def _request(method: str, url: str, body: Any, key: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    reply = httpx.request(method, url, json=body, headers=headers, timeout=30.0)
    if not reply.is_success:
        raise ConfigError(f"{url}: {reply.status_code} {reply.text}")
    return dict(reply.json())


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).is_success
    except httpx.TransportError:
        return False
