"""The whole deployment on this machine, by the command line alone: up, crashes, a job to its end, down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from penstock.client import Client
from penstock.local import UpState, read_state

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

SMOKE = Path(__file__).resolve().parents[2] / "deploy" / "smoke.yaml"


def penstock(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **env}
    )  # fmt: skip


def wait_until(true: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return found


def running(directory: Path) -> UpState:
    state = read_state(directory)
    assert state is not None
    return state


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpState]:
    result = penstock("up", "--detach", "--port", "0", "--data-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    state = running(tmp_path)
    assert result.stdout.strip() == state.url
    yield state
    if read_state(tmp_path) is not None:
        penstock("down", "--data-dir", str(tmp_path))


def test_a_job_survives_the_death_of_every_process(up: UpState, tmp_path: Path) -> None:
    again = penstock("up", "--port", "0", "--data-dir", str(tmp_path))
    assert again.returncode == 2
    assert f"process {up.pid}, {up.url}" in again.stderr
    taken = penstock("up", "--port", up.url.rpartition(":")[2], "--data-dir", str(tmp_path / "other"))
    assert taken.returncode == 2
    assert "is not free" in taken.stderr
    assert not (tmp_path / "other").exists()

    job = yaml.safe_load(SMOKE.read_text())
    with Client(up.url, retries=8) as client:
        record = client.submit(job)
        total = job["train"]["max_updates"]
        client.wait(record.id, goal="running", timeout_s=120)

        def reached(step: int) -> bool:
            return client.get(record.id).status.step >= step

        def is_new(name: str, before: int) -> bool:
            return running(tmp_path).processes[name] != before

        victims = sorted(up.processes)
        for i, name in enumerate(victims, 1):
            wait_until(partial(reached, i * total // (len(victims) + 1)), f"progress before {name} is killed", 120)
            before = running(tmp_path).processes[name]
            os.kill(before, signal.SIGKILL)
            wait_until(partial(is_new, name, before), f"restart of {name}")
        end = client.wait(record.id, timeout_s=200)
        assert (end.status.phase, end.status.step) == ("succeeded", total)
        report = client.audit(record.id)
        assert report["ok"], report["violations"]
        assert client.samples(record.id, limit=3)
    env = {"PENSTOCK_URL": up.url}
    assert json.loads(penstock("audit", "smoke", "--json", **env).stdout)["ok"]
    assert penstock("logs", "smoke", "--service", "trainer-0", **env).returncode == 0

    processes = running(tmp_path).processes
    down = penstock("down", "--data-dir", str(tmp_path))
    assert down.returncode == 0, down.stderr
    assert all(gone(pid) for pid in (*processes.values(), up.pid))
    assert "nothing runs" in penstock("down", "--data-dir", str(tmp_path)).stderr


def test_nothing_outlives_a_killed_supervisor(up: UpState, tmp_path: Path) -> None:
    os.kill(up.pid, signal.SIGKILL)
    wait_until(lambda: all(gone(pid) for pid in up.processes.values()), "death of the children", 10)
    assert read_state(tmp_path) is None
    again = penstock("up", "--detach", "--port", "0", "--data-dir", str(tmp_path))
    assert again.returncode == 0, again.stderr
