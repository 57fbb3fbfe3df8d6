"""Leashed processes, the claim on a data directory, ports and restarts, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from penstock.local import Stack, StackOptions, read_state
from penstock.local.child import Backoff, KeptAlive, LeashedNats, ServiceProcess
from penstock.local.leash import leashed
from penstock.local.ports import claimable, free_ports
from penstock.local.state import Claim, UpState
from penstock.shared.errors import ConfigError, Unavailable
from tests.processes import is_alive


def wait_until(true: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)


@pytest.mark.long
def test_a_leashed_program_dies_with_its_parent() -> None:
    code = (
        "import subprocess, sys, time; from penstock.local.leash import leashed; "
        "p = subprocess.Popen(leashed(['sleep', '600']), start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: child.name() == "sleep", "exec")
        parent.kill()
        parent.wait()
        wait_until(lambda: not is_alive(child), "death of the child")


def test_a_leash_passes_arguments_and_exit_code() -> None:
    result = subprocess.run(
        leashed(["sh", "-c", 'echo "$0 $1"; exit 7', "a b", "*"]), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (7, "a b *\n")


async def test_a_bus_that_does_not_answer_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.local.stack.REACH_S", 1.0)
    with socket.socket() as probe:  # bound and not listening: refuses every connection
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        stack = Stack(StackOptions(data_dir=tmp_path / "data", nats_url=f"nats://user:secret@127.0.0.1:{port}"))
        with pytest.raises(Unavailable, match=rf"cannot reach NATS at nats://127\.0\.0\.1:{port} within") as error:
            async with stack:
                pass
    assert "PENSTOCK_NATS_URL" in str(error.value)
    assert "secret" not in str(error.value)
    assert stack.processes == {}
    assert not (tmp_path / "data").exists()


def state(directory: Path) -> UpState:
    return UpState(
        pid=os.getpid(), url="http://u", nats_url="n", redis_url=None, data_dir=str(directory), started=1.0,
        processes={"nats": 1},
    )  # fmt: skip


def test_one_stack_per_directory(tmp_path: Path) -> None:
    with Claim(tmp_path) as claim:
        claim.write(state(tmp_path))
        assert read_state(tmp_path) == state(tmp_path)
        assert (tmp_path / "up.json").stat().st_mode & 0o077 == 0, "addresses may hold passwords"
        with pytest.raises(ConfigError, match=rf"already runs in .* \(process {os.getpid()}, http://u\)"):
            Claim(tmp_path)
    assert read_state(tmp_path) is None
    Claim(tmp_path).release()


def test_a_crash_leaves_no_claim(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from penstock.local.state import Claim, UpState; "
        "c = Claim(Path(sys.argv[1])); "
        "c.write(UpState(pid=1, url='u', nats_url='n', redis_url=None, data_dir='d', started=0, processes={})); "
        "print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert read_state(tmp_path) is not None
        holder.kill()
        holder.wait()
    assert (tmp_path / "up.json").exists()
    assert read_state(tmp_path) is None
    Claim(tmp_path).release()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data-dir"):
        Claim(tmp_path / "file" / "x")


def test_ports() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    claimable("127.0.0.1", ports[0])
    taken = pytest.raises(ConfigError, match=rf"port {ports[0]} of 127\.0\.0\.1 is not free")
    with socket.create_server(("127.0.0.1", ports[0])), taken:
        claimable("127.0.0.1", ports[0])
    with pytest.raises(ConfigError, match="cannot listen on"):
        claimable("no.such.host.invalid", 1)


def test_backoff() -> None:
    backoff = Backoff()
    pauses = [backoff.after(0.1) for _ in range(7)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [backoff.after(10.0), backoff.after(1.0)] == [0.2, 0.4]


async def test_a_killed_server_comes_back_on_its_port(tmp_path: Path) -> None:
    nats = LeashedNats(tmp_path / "nats")
    messages: list[str] = []
    with ThreadPoolExecutor(1) as starter:
        kept = KeptAlive(nats, starter, messages.append)
        await kept.start()
        url, first = nats.url, nats.pid
        assert psutil.Process(first).name() == "nats-server"
        restarted = asyncio.Event()
        keeper = asyncio.create_task(kept.keep(restarted.set))
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(10):
            await restarted.wait()
        assert (nats.url, kept.restarts) == (url, 1)
        assert nats.pid != first
        socket.create_connection(("127.0.0.1", nats.port), 2).close()
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await kept.stop(5)
    assert messages[0].startswith("nats ended after")


async def test_a_disk_that_is_full_for_a_moment_stops_nothing(tmp_path: Path) -> None:
    class Reluctant(LeashedNats):
        starts = 0

        def start(self) -> None:
            self.starts += 1
            if self.starts == 2:
                raise OSError(28, "No space left on device")
            super().start()

    nats = Reluctant(tmp_path / "nats")
    messages: list[str] = []
    restarted = asyncio.Event()

    def write_down() -> None:
        restarted.set()
        raise OSError(28, "No room for a note")

    with ThreadPoolExecutor(1) as starter:
        kept = KeptAlive(nats, starter, messages.append)
        await kept.start()
        keeper = asyncio.create_task(kept.keep(write_down))
        os.kill(nats.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await restarted.wait()
        assert not keeper.done()
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await kept.stop(5)
    assert any("did not start: [Errno 28] No space left" in line for line in messages)
    assert "No room for a note" in messages[-1]


async def test_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    environment = {"PENSTOCK_LEASE_S": "never"}
    child = ServiceProcess("reward", "reward-0", environment=environment, log_dir=tmp_path)
    with ThreadPoolExecutor(1) as starter:
        kept = KeptAlive(child, starter, lambda _: None)
        await kept.start()
        async with asyncio.timeout(30):
            with pytest.raises(ConfigError, match=r"reward-0 cannot run as configured: .*PENSTOCK_LEASE_S"):
                await kept.keep(lambda: None)
    assert kept.restarts == 0
