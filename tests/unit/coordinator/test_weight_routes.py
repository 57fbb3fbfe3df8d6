"""The transport that the coordinator chooses for each worker."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.leader.weight_routes import transports_of
from penstock.shared.protocol.messages import Heartbeat

JOB = "job_a"
ALL = ["shm", "gloo", "tcp", "disk"]


def members(
    trainer: list[str], workers: dict[str, tuple[str, list[str]]], devices: dict[str, list[str]] | None = None
) -> Members:
    found = Members()
    everybody: dict[str, tuple[str, str, list[str]]] = {"t": ("trainer", "a", trainer)}
    everybody |= {name: ("rollout", host, ways) for name, (host, ways) in workers.items()}
    for name, (service, host, ways) in everybody.items():
        row = {"transports": ways} | ({"devices": devices[name]} if devices else {})
        jobs: dict[str, dict[str, Any]] = {JOB: row} if ways else {}
        found.on_heartbeat(beat(service, name, host, jobs), 0.0)
    return found


def beat(service: str, name: str, host: str, jobs: dict[str, dict[str, Any]]) -> Heartbeat:
    return Heartbeat(
        service=service,
        worker=name,
        host=host,
        pid=1,
        started=0.0,
        interval_s=1.0,
        health_port=0,
        ready=True,
        jobs=jobs,
    )


@pytest.mark.parametrize(
    ("trainer", "workers", "chosen"),
    [
        (["shm"], {"w": ("a", ALL)}, {"w": "shm"}),
        (["shm", "tcp"], {"w": ("a", ALL), "x": ("b", ALL)}, {"w": "shm", "x": "tcp"}),
        (["shm", "tcp", "gloo"], {"x": ("b", ALL), "y": ("c", ALL)}, {"x": "gloo", "y": "gloo"}),
        (
            ["shm", "tcp", "gloo"],
            {"x": ("b", ALL), "y": ("b", ALL), "z": ("c", ALL)},
            {"x": "tcp", "y": "tcp", "z": "gloo"},
        ),
        (["shm", "tcp", "gloo"], {"x": ("b", ["shm", "tcp", "disk"])}, {"x": "tcp"}),
        (["shm", "disk"], {"x": ("b", ALL), "y": ("b", ALL)}, {"x": "disk", "y": "disk"}),
        (["shm", "tcp", "disk"], {"w": ("a", ALL), "x": ("b", ALL)}, {"w": "shm", "x": "tcp"}),
        (["shm", "disk"], {"w": ("a", ALL), "x": ("b", ["shm", "tcp"])}, {"w": "shm"}),
        (["shm"], {"w": ("a", ALL), "x": ("b", ALL)}, {"w": "shm"}),
        (["shm", "tcp"], {"old": ("b", [])}, {}),
        ([], {"w": ("a", ALL)}, {}),
    ],
)  # fmt: skip
def test_each_worker_gets_the_fastest_transport_that_both_ends_support(
    trainer: list[str], workers: dict[str, tuple[str, list[str]]], chosen: dict[str, str]
) -> None:
    assert transports_of(JOB, members(trainer, workers), 1.0) == chosen


def test_workers_that_can_read_the_trainers_gpu_memory_take_weights_from_it() -> None:
    ways, devices = ["cuda_ipc", *ALL], {"t": ["GPU-0"], "own": ["GPU-0"], "peer": ["GPU-1", "GPU-0"]}
    devices |= {"stranger": ["GPU-2"], "cpu": [], "off": ["GPU-0"], "far": ["GPU-0"]}
    workers = dict.fromkeys(("own", "peer", "stranger", "cpu"), ("a", ways))
    workers |= {"off": ("a", ALL), "far": ("b", ways)}
    assert transports_of(JOB, members(ways, workers, devices), 1.0) == {
        "own": "cuda_ipc", "peer": "cuda_ipc", "stranger": "shm", "cpu": "shm", "off": "shm", "far": "gloo",
    }  # fmt: skip


def test_a_worker_without_heartbeats_is_in_no_group() -> None:
    found = members(["shm", "tcp", "gloo"], {"x": ("b", ALL), "y": ("c", ALL)})
    later = 60.0
    for name, host in (("t", "a"), ("x", "b")):
        service = "trainer" if name == "t" else "rollout"
        found.on_heartbeat(beat(service, name, host, {JOB: {"transports": ALL}}), later)
    assert transports_of(JOB, found, later) == {"x": "gloo"}
