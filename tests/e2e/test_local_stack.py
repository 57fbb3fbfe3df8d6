"""A whole deployment on this machine, by the command line alone: start, crashes, a job to its end, stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from penstock.client import Client
from penstock.local import UpState, read_state
from penstock.shared.config.base import with_overrides
from penstock.shared.config.service import load_settings
from tests.processes import is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
SMOKE, EXAMPLES = ROOT / "deploy" / "smoke.yaml", ROOT / "examples"
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


def up(directory: Path, *words: str) -> UpState:
    result = penstock("up", "--detach", "--port", "0", "--data-dir", str(directory), "--json", *words)
    assert result.returncode == 0, result.stderr
    state, shown = running(directory), json.loads(result.stdout)
    assert (shown["url"], shown["pid"], shown["data_dir"]) == (state.url, state.pid, str(directory))
    assert shown["processes"].keys() == state.processes.keys()
    assert f"penstock down --data-dir {directory}" in result.stderr
    assert str(directory / "api.key") in result.stderr
    assert result.stderr.count(f"the page is at {state.url}/\n") == 1, result.stderr
    assert "Ctrl-C" not in result.stderr
    assert f"next: penstock submit {EXAMPLES / 'addition.yaml'} --follow\n" in result.stderr
    return state


@pytest.fixture
def vllm(python_with: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interpreter with vLLM, which ``penstock engines`` finds in whatever home directory."""
    python = python_with("vllm")
    monkeypatch.setenv("PENSTOCK_ENGINES_DIR", str(python.parents[2]))
    return python


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Data directory of a deployment as users start it: with a key of its own, which clients find below their home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PENSTOCK_OPEN_LOOPBACK")
    for name in ("PENSTOCK_API_KEY", "PENSTOCK_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    directory = tmp_path / "data"
    yield directory
    if read_state(directory) is not None:
        penstock("down", "--data-dir", str(directory))


@pytest.mark.long
def test_a_deployment_from_up_to_down(directory: Path) -> None:
    """Refused starts, a killed service, a supervisor killed in mid-job, a restart that ends the job, and ``down``."""
    state = up(directory)
    check_refusals(state, directory)
    check_locks(state, directory)
    job = begin_job(state, directory)

    state = running(directory)
    os.kill(state.pid, signal.SIGKILL)
    wait_until(lambda: all(not is_alive(pid) for pid in state.processes.values()), "death of the children", 10)
    wait_until(lambda: read_state(directory) is None, "the end of the lock that the supervisor held", 10)
    state = up(directory)
    check_end(state, job)

    processes = running(directory).processes
    down = penstock("down")
    assert down.returncode == 0, "it finds the only deployment of this user: " + down.stderr
    assert all(not is_alive(pid) for pid in (*processes.values(), state.pid))
    assert list(load_settings().shm_dir.iterdir()) == [], "nothing is left in shared memory"
    assert "nothing runs" in penstock("down", "--data-dir", str(directory)).stderr


def check_refusals(state: UpState, directory: Path) -> None:
    """Check that nothing starts in a directory that is in use, or on a port that is taken."""
    again = penstock("up", "--port", "0", "--data-dir", str(directory))
    assert again.returncode == 2
    assert f"process {state.pid}, {state.url}" in again.stderr
    taken = penstock("up", "--port", state.url.rpartition(":")[2], "--data-dir", str(directory / "other"))
    assert taken.returncode == 2
    assert "is not free" in taken.stderr
    assert not (directory / "other").exists()


def check_locks(state: UpState, directory: Path) -> None:
    """Check that another user of this machine reaches neither the API, nor the bus, nor Valkey, nor a file."""
    refused = httpx.get(f"{state.url}/v1/jobs")
    assert refused.status_code == 401
    assert "api.key" in refused.json()["detail"], "says where the key is"
    assert (directory.stat().st_mode & 0o777, (directory / "api.key").stat().st_mode & 0o777) == (0o700, 0o600)
    assert all(file.stat().st_mode & 0o077 == 0 for file in (directory / "secrets").iterdir())
    port = int(state.nats_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(b'CONNECT {"verbose":false}\r\nPUB $KV.keys.forged 1\r\nx\r\nPING\r\n')
        assert b"Authorization Violation" in b"".join(iter(lambda: stranger.recv(4096), b""))
    assert state.redis_url is None or state.redis_url.startswith("unix://")
    environment = psutil.Process(state.processes["rollout-0"]).environ()
    key = (directory / "api.key").read_text().strip()
    assert not any(key in value for value in environment.values()), "user code in a worker is no administrator"
    assert "://rollout:" in environment["PENSTOCK_NATS_URL"]


def begin_job(state: UpState, directory: Path) -> str:
    """Submit a job, kill a service once the job trains, and wait for the restart; return the id of the job."""
    job = with_overrides(yaml.safe_load(SMOKE.read_text()), [f"train.max_updates={TOTAL}", "warm_start.steps=20"])
    with Client(state.url, retries=8) as client:
        id = client.submit(job).id
        wait_until(lambda: client.get(id).status.step >= 3, "progress before the kill", 120)
        before = running(directory).processes["reward-0"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: running(directory).processes["reward-0"] not in (0, before), "restart of the service")
        assert client.get(id).status.phase == "running"
    memory = load_settings().shm_dir
    assert list(memory.glob(f"penstock-weights-{id}.*")), "weights"
    assert list(memory.glob("penstock-bulk-*")), "groups"
    return id


def check_end(state: UpState, job: str) -> None:
    """Check that the job, during which every process was killed, succeeds without help."""
    with Client(state.url, retries=8) as client:
        end = client.wait(job, timeout_s=200)
        assert (end.status.phase, end.status.step) == ("succeeded", TOTAL)
        report = client.audit(job)
        assert report["ok"], report["violations"]
        assert client.samples(job, limit=3)
    env = {"PENSTOCK_URL": state.url}
    assert json.loads(penstock("audit", "smoke", "--json", **env).stdout)["ok"]
    assert penstock("logs", "smoke", "--service", "trainer-0", **env).returncode == 0


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_up_with_vllm_trains_a_job_on_it(vllm: Path, directory: Path) -> None:
    """The environment is there, so ``up`` installs nothing, and starts its rollout worker with that interpreter."""
    state = up(directory, "--engine", "vllm")
    assert "step 1 of" not in (directory / "logs" / "up.log").read_text()
    pythons = [psutil.Process(state.processes[name]).cmdline()[0] for name in ("rollout-0", "trainer-0")]
    assert pythons == [str(vllm), sys.executable]
    job = with_overrides(yaml.safe_load(SMOKE.read_text()), ["train.max_updates=2", "warm_start.steps=20"])
    with Client(state.url, retries=8) as client:
        id = client.submit({**job, "rollout": {"engine": "vllm", "kv_cache_gib": 0.25}}).id
        end = client.wait(id, timeout_s=600)
        assert (end.status.phase, end.status.step) == ("succeeded", 2), client.why(id)
        report = client.audit(id)
        assert report["ok"], report["violations"]
