"""Broadcasts of weights between hosts whose members die or whose links are cut: no receiver hangs or mixes versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Hosts, can_make_hosts

pytestmark = [pytest.mark.long, pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")]

NUM_FLOATS = 6_000_000
NBYTES = 4 * NUM_FLOATS
NAMES = ["a", "b", "c"]
LONGEST_S = 30.0
"""Upper bound of a receiver's waiting time for one broadcast, on a busy machine."""

COMMON = """
import json, sys, time, msgspec, torch
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import collective, layout_of, open_publisher, open_receiver
torch.set_num_threads(1)
collective.MEET_S, collective.STANDSTILL_S, collective.BUCKET_BYTES = 5.0, 4.0, 1 << 20
name, directory, address = sys.argv[1:]
settings = ServiceSettings(
    host_id=name, worker_id=name, shm_dir=Path(directory), bulk_host=address, weight_collective="gloo")
def routes(words):
    return WeightRoutes(epoch=int(words[0]), transports=dict.fromkeys(words[1].split(","), "gloo"))
"""

TRAINER = f"""{COMMON}
layout = layout_of([("w", torch.empty({NUM_FLOATS}))])
publisher = open_publisher("job_b", layout, settings)
for line in sys.stdin:
    version, *words = line.split()
    publisher.open(layout, routes(words).members, routes(words).epoch)
    manifest = publisher.publish([("w", torch.full(({NUM_FLOATS},), float(version)))], version=int(version), epoch=1)
    print(msgspec.msgpack.encode(manifest).hex(), flush=True)
"""

WORKER = f"""{COMMON}
receiver = open_receiver(settings)
print("ready", flush=True)
for line in sys.stdin:
    *words, only, data = line.split()
    receiver.follow(name, routes(words))
    manifest, start = msgspec.msgpack.decode(bytes.fromhex(data), type=WeightManifest), time.monotonic()
    try:
        staged = (receiver._receivers["gloo"] if only == "only" else receiver).stage(manifest)
        values = staged.tensors()["w"]
        answer = {{"way": staged.way.transport, "values": [float(values.min()), float(values.max())]}}
        staged.release()
    except WeightsError as error:
        answer = {{"error": str(error)}}
    print(json.dumps(answer | {{"seconds": time.monotonic() - start}}), flush=True)
"""


class Plane:
    """A trainer on host 1 and one member of the broadcast on each further host."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.trainer = self._start(1, TRAINER, "t", directory)
        self.members = {name: self._start(host, WORKER, name, directory) for host, name in enumerate(NAMES, 2)}
        for member in self.members.values():
            assert _line(member) == "ready"

    def _start(self, host: int, script: str, name: str, directory: Path) -> subprocess.Popen[str]:
        own = directory / name
        own.mkdir()
        command = [sys.executable, "-c", script, name, str(own), self.hosts.address(host)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return self.hosts.start(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def send(self, version: int, epoch: int, names: list[str], *, only: bool = False) -> None:
        """Publish a version to ``names``, which begin to stage it; with ``only``, they accept no other transport."""
        routes = f"{epoch} {','.join(names)}"
        _send(self.trainer, f"{version} {routes}")
        data = _line(self.trainer)
        for name in names:
            _send(self.members[name], f"{routes} {'only' if only else 'any'} {data}")

    def answers(self, names: list[str]) -> list[dict[str, Any]]:
        return [json.loads(_line(self.members[name])) for name in names]

    def middle(self, host: int) -> None:
        """Wait until a tenth of a version has arrived at a host."""
        before, deadline = self.hosts.received_bytes(host), time.monotonic() + 60
        while self.hosts.received_bytes(host) < before + NBYTES // 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        for process in (self.trainer, *self.members.values()):
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


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    hosts = Hosts(4)
    made = Plane(hosts, tmp_path)
    yield made
    made.close()
    hosts.close()


def test_losses_in_the_middle_of_a_broadcast(plane: Plane) -> None:
    plane.send(1, 1, NAMES)
    assert [(one["way"], one["values"]) for one in plane.answers(NAMES)] == [("gloo", [1, 1])] * 3

    plane.hosts.slow(1, "80mbit")
    plane.send(2, 1, NAMES, only=True)
    plane.middle(3)
    plane.hosts.cut(3)
    for one in plane.answers(NAMES):
        assert "error" in one
        assert one["seconds"] < LONGEST_S
    plane.hosts.heal(3)
    plane.hosts.slow(1, "10gbit")
    plane.send(2, 2, NAMES, only=True)
    assert [one.get("values") for one in plane.answers(NAMES)] == [[2, 2]] * 3

    plane.hosts.slow(1, "80mbit")
    plane.send(3, 2, NAMES)
    plane.middle(4)
    plane.members["c"].kill()
    plane.hosts.slow(1, "10gbit")
    left = NAMES[:2]
    for one in plane.answers(left):
        assert (one["way"], one["values"]) == ("tcp", [3, 3])
        assert one["seconds"] < LONGEST_S
    plane.send(4, 3, left)
    assert [(one["way"], one["values"]) for one in plane.answers(left)] == [("gloo", [4, 4])] * 2
