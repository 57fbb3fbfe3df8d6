"""Weights of another host cross the network once per host, even if the fetching process stops or dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bulk_segment import LockedFile
from penstock.shared.weights.slots import slot_paths, turn_path
from tests.hosts import Hosts, can_make_hosts

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")

JOB, FAR = "job_far", "far"
NUM_FLOATS = 6_000_000
NBYTES = 4 * NUM_FLOATS

TRAINER = f"""
import sys, msgspec, torch
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.weights import layout_of, open_publisher
torch.set_num_threads(1)
deltas = sys.argv[3] == "deltas"
settings = ServiceSettings(host_id="near", shm_dir=Path(sys.argv[1]), bulk_host=sys.argv[2], weight_deltas=deltas)
weights = torch.empty({NUM_FLOATS})
publisher = open_publisher("{JOB}", layout_of([("w", weights)]), settings)
for line in sys.stdin:
    version, step = map(int, line.split())
    weights[::step] = version
    manifest = publisher.publish([("w", weights)], version=version, epoch=1)
    print(msgspec.msgpack.encode(manifest).hex(), flush=True)
"""

WORKER = """
import json, sys, time, msgspec, torch
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.weights.tcp import TcpReceiver
torch.set_num_threads(1)
receiver = TcpReceiver(ServiceSettings(host_id="far", shm_dir=Path(sys.argv[1])), timeout_s=float(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    manifest, start = msgspec.msgpack.decode(bytes.fromhex(line), type=WeightManifest), time.monotonic()
    try:
        staged = receiver.stage(manifest)
        values = staged.tensors()["w"]
        answer = {"kind": type(staged).__name__, "fetched": staged.way.fetched_bytes,
                "values": [float(values.min()), float(values.max())]}
        staged.release()
    except WeightsError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer | {"seconds": time.monotonic() - start}), flush=True)
receiver.close()
"""


class Plane:
    """A trainer on host 1 and three workers on host 2. ``mode``: 'deltas' or 'whole' versions."""

    def __init__(self, hosts: Hosts, directory: Path, *, timeout_s: float = 60.0, mode: str = "whole") -> None:
        self.hosts, self.shm = hosts, directory / "far"
        near = directory / "near"
        for path in (near, self.shm):
            path.mkdir()
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "env": os.environ | {"OMP_NUM_THREADS": "1"},
        }
        trainer = [sys.executable, "-c", TRAINER, str(near), hosts.address(1), mode]
        self.trainer = hosts.start(1, trainer, **pipes)
        command = [sys.executable, "-c", WORKER, str(self.shm), str(timeout_s)]
        self.workers = [hosts.start(2, command, **pipes) for _ in range(3)]
        for worker in self.workers:
            assert _line(worker) == "ready"

    def publish(self, version: int, *, step: int = 1) -> WeightManifest:
        """Publish a version in which each ``step``-th weight is the number of the version, and others are as before."""
        data = bytes.fromhex(_ask(self.trainer, f"{version} {step}"))
        return msgspec.msgpack.decode(data, type=WeightManifest)

    def send(self, manifest: WeightManifest) -> None:
        """Send a manifest to all workers, which begin to stage its version."""
        for worker in self.workers:
            _send(worker, msgspec.msgpack.encode(manifest).hex())

    def answers(self, workers: list[subprocess.Popen[str]] | None = None) -> list[dict[str, Any]]:
        return [json.loads(_line(worker)) for worker in (self.workers if workers is None else workers)]

    def fetching(self) -> subprocess.Popen[str]:
        """Wait until some of the version has arrived, and return the worker that fetches it."""
        before, deadline = self.hosts.received_bytes(2), time.monotonic() + 30
        path = turn_path(self.shm, JOB, FAR)
        while time.monotonic() < deadline:
            if path.exists() and self.hosts.received_bytes(2) > before + NBYTES // 10:
                file = LockedFile.open(path)
                holders = file.holders()
                file.close()
                return next(worker for worker in self.workers if worker.pid in holders)
            time.sleep(0.01)
        raise AssertionError("no worker fetches")

    def close(self) -> None:
        for process in (self.trainer, *self.workers):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(timeout=30)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _send(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _ask(process: subprocess.Popen[str], text: str) -> str:
    _send(process, text)
    return _line(process)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(2)
    yield made
    made.close()


@pytest.fixture
def plane(hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plane]:
    made = Plane(hosts, tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


@pytest.mark.long
def test_three_workers_of_a_host_cost_one_transfer(plane: Plane) -> None:
    for version in range(1, 5):
        manifest = plane.publish(version)
        before = plane.hosts.received_bytes(2)
        plane.send(manifest)
        answers = plane.answers()
        assert [answer["values"] for answer in answers] == [[version, version]] * 3
        assert sorted(answer["fetched"] for answer in answers) == [0, 0, NBYTES]
        assert NBYTES < plane.hosts.received_bytes(2) - before < 1.2 * NBYTES
    assert len(slot_paths(plane.shm, JOB, FAR)) <= 3
    for worker in plane.workers:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait(timeout=30)
    assert not list(plane.shm.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("plane", [{"mode": "deltas"}], indirect=True)
def test_three_workers_of_a_host_cost_one_transfer_of_the_changes(plane: Plane) -> None:
    for version in range(1, 5):
        manifest = plane.publish(version, step=1 if version == 1 else 50)
        before = plane.hosts.received_bytes(2)
        plane.send(manifest)
        answers = plane.answers()
        assert [answer["values"] for answer in answers] == [[1, version]] * 3
        *others, fetched = sorted(answer["fetched"] for answer in answers)
        assert others == [0, 0]
        assert fetched == NBYTES if version == 1 else fetched < NBYTES / 25
        assert fetched < plane.hosts.received_bytes(2) - before < 1.2 * fetched + 100_000


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_other_workers_continue_when_the_fetching_worker_ends(plane: Plane, end: signal.Signals) -> None:
    plane.hosts.slow(1, "200mbit")
    plane.send(plane.publish(1))
    fetching = plane.fetching()
    fetching.send_signal(end)
    left = [worker for worker in plane.workers if worker is not fetching]
    plane.hosts.slow(1, "10gbit")
    answers = plane.answers(left)
    assert [answer["values"] for answer in answers] == [[1, 1]] * 2
    if end is signal.SIGKILL:
        assert sorted(answer["fetched"] for answer in answers) == [0, NBYTES]
    else:
        assert {answer["kind"] for answer in answers} == {"LocalStaged"}
        fetching.send_signal(signal.SIGCONT)
        assert "values" in plane.answers([fetching])[0]


@pytest.mark.long
@pytest.mark.parametrize("plane", [{"timeout_s": 4.0}], indirect=True)
def test_a_cut_link_ends_all_waits_in_time_and_mixes_no_versions(plane: Plane) -> None:
    plane.send(plane.publish(1))
    assert [answer["values"] for answer in plane.answers()] == [[1, 1]] * 3
    plane.hosts.slow(1, "40mbit")
    manifest = plane.publish(2)
    plane.send(manifest)
    plane.fetching()
    plane.hosts.cut(2)
    for answer in plane.answers():
        assert "error" in answer
        assert answer["seconds"] < 7
    plane.hosts.heal(2)
    plane.hosts.slow(1, "10gbit")
    plane.send(manifest)
    assert [answer.get("values") for answer in plane.answers()] == [[2, 2]] * 3
