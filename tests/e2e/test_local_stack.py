"""The whole deployment on this machine, by the command line alone: up, crashes, a job to its end, down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from penstock.client import Client
from penstock.local import UpState, read_state
from penstock.shared.config.base import with_overrides

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

SMOKE = Path(__file__).resolve().parents[2] / "deploy" / "smoke.yaml"
TOTAL = 30


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


def up(directory: Path) -> UpState:
    result = penstock("up", "--detach", "--port", "0", "--data-dir", str(directory), "--json")
    assert result.returncode == 0, result.stderr
    state, told = running(directory), json.loads(result.stdout)
    assert (told["url"], told["pid"], told["data_dir"]) == (state.url, state.pid, str(directory))
    assert told["processes"].keys() == state.processes.keys()
    return state


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if read_state(tmp_path) is not None:
        penstock("down", "--data-dir", str(tmp_path))


def test_a_deployment_from_up_to_down(directory: Path) -> None:
    """Refusals, a killed service, a killed supervisor in the middle of a job, a second life that ends it, the end."""
    state = up(directory)
    check_refusals(state, directory)
    job = begin_job(state, directory)

    state = running(directory)
    os.kill(state.pid, signal.SIGKILL)
    wait_until(lambda: all(gone(pid) for pid in state.processes.values()), "death of the children", 10)
    wait_until(lambda: read_state(directory) is None, "the end of the lock that the supervisor held", 10)
    state = up(directory)
    check_end(state, job)

    processes = running(directory).processes
    down = penstock("down", "--data-dir", str(directory))
    assert down.returncode == 0, down.stderr
    assert all(gone(pid) for pid in (*processes.values(), state.pid))
    assert "nothing runs" in penstock("down", "--data-dir", str(directory)).stderr


def check_refusals(state: UpState, directory: Path) -> None:
    """Nothing starts where something runs, and not on a port that is taken."""
    again = penstock("up", "--port", "0", "--data-dir", str(directory))
    assert again.returncode == 2
    assert f"process {state.pid}, {state.url}" in again.stderr
    taken = penstock("up", "--port", state.url.rpartition(":")[2], "--data-dir", str(directory / "other"))
    assert taken.returncode == 2
    assert "is not free" in taken.stderr
    assert not (directory / "other").exists()


def begin_job(state: UpState, directory: Path) -> str:
    """A job under way; a service that is killed is started again."""
    job = with_overrides(yaml.safe_load(SMOKE.read_text()), [f"train.max_updates={TOTAL}", "warm_start.steps=20"])
    with Client(state.url, retries=8) as client:
        id = client.submit(job).id
        wait_until(lambda: client.get(id).status.step >= 3, "progress before the kill", 120)
        before = running(directory).processes["reward-0"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: running(directory).processes["reward-0"] not in (0, before), "restart of the service")
        assert client.get(id).status.phase == "running"
    return id


def check_end(state: UpState, job: str) -> None:
    """Every process was killed in the middle of the job; nobody helps, and it ends as it should."""
    with Client(state.url, retries=8) as client:
        end = client.wait(job, timeout_s=200)
        assert (end.status.phase, end.status.step) == ("succeeded", TOTAL)
        report = client.audit(job)
        assert report["ok"], report["violations"]
        assert client.samples(job, limit=3)
    env = {"PENSTOCK_URL": state.url}
    assert json.loads(penstock("audit", "smoke", "--json", **env).stdout)["ok"]
    assert penstock("logs", "smoke", "--service", "trainer-0", **env).returncode == 0
