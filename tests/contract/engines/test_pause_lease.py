"""The watchdog that continues a paused server whose worker was killed, with real processes and an HTTP server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.services.rollout.engines.servers import pause_lease
from tests.processes import is_alive

WORKER = """
import fcntl, os, sys, time
sys.path.insert(0, sys.argv[1])
from pause_lease import PauseLease
claim = os.open(sys.argv[3], os.O_RDWR | os.O_CREAT)
fcntl.flock(claim, fcntl.LOCK_EX)
lease = PauseLease(sys.argv[2], [claim])
child = 0
for step in sys.argv[4:]:
    if step == "fork":
        child = os.fork()
        if not child:
            time.sleep(600)
    else:
        getattr(lease, step)()
print(lease.pid, child, flush=True)
time.sleep(600)
"""


class Paused(ThreadingHTTPServer):
    """A server that notes the path of each POST, and if the claim on it was locked by then."""

    def __init__(self, claim: Path) -> None:
        self.claim, self.continued = claim, list[tuple[str, bool]]()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Paused

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.continued.append((self.path, is_locked(self.server.claim)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def is_locked(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Paused]:
    with Paused(tmp_path / "claim") as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def kill_a_worker(server: Paused, *steps: str, signalled: Sequence[signal.Signals] = (), stderr: int = 2) -> None:
    """Kill a worker that has taken these steps, and wait until its watchdog has ended.

    Args:
        signalled: signals that the watchdog gets before.
        stderr: descriptor of the standard error of both.
    """
    url = f"http://127.0.0.1:{server.server_port}/go"
    folder = Path(pause_lease.__file__).parent
    command = [sys.executable, "-I", "-S", "-c", WORKER, str(folder), url, str(server.claim), *steps]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as worker:
        assert worker.stdout is not None
        watchdog, child = map(int, worker.stdout.readline().split())
        try:
            assert is_alive(watchdog)
            assert server.continued == []
            for number in signalled:
                os.kill(watchdog, number)
            worker.kill()
            worker.wait()
            wait_for_the_end(watchdog)
        finally:
            for pid in filter(None, (watchdog, child)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def wait_for_the_end(watchdog: int) -> None:
    end = time.monotonic() + 60
    while is_alive(watchdog):
        assert time.monotonic() < end, "the watchdog goes on"
        time.sleep(0.02)


def test_a_worker_that_is_killed_in_a_pause_leaves_a_server_that_goes_on(server: Paused) -> None:
    kill_a_worker(server, "hold")
    assert server.continued == [("/go", True)] * 2, "once more for a pause that was on its way, with the claim locked"
    assert not is_locked(server.claim)


def test_a_process_that_the_worker_forked_does_not_keep_the_pause(server: Paused) -> None:
    kill_a_worker(server, "hold", "fork")
    assert server.continued == [("/go", True)] * 2


def test_signals_to_all_processes_of_a_service_do_not_end_the_lease(server: Paused) -> None:
    kill_a_worker(server, "hold", signalled=[signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    assert server.continued == [("/go", True)] * 2


def test_a_server_continues_although_the_log_ended_with_the_worker(server: Paused) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        kill_a_worker(server, "hold", stderr=write)
    finally:
        os.close(write)
    assert server.continued == [("/go", True)] * 2


def test_a_pause_that_is_over_is_not_ended_again(server: Paused) -> None:
    kill_a_worker(server, "hold", "free")
    assert server.continued == []
    assert not is_locked(server.claim)


def test_a_second_pause_is_ended_as_the_first(server: Paused) -> None:
    kill_a_worker(server, "hold", "free", "hold")
    assert len(server.continued) == 2


def test_a_lease_that_is_closed_in_a_pause_ends_it(server: Paused) -> None:
    server.claim.touch()
    lease = pause_lease.PauseLease(f"http://127.0.0.1:{server.server_port}/go")
    lease.hold()
    lease.close()
    lease.close()
    assert [path for path, _ in server.continued] == ["/go"] * 2


def test_a_watchdog_that_was_killed_is_replaced_at_the_next_pause(server: Paused) -> None:
    server.claim.touch()
    lease = pause_lease.PauseLease(f"http://127.0.0.1:{server.server_port}/go")
    lease.hold()
    first = lease.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_for_the_end(first)
    lease.free()
    lease.hold()
    assert lease.pid not in (None, first)
    lease.free()
    lease.close()
    assert server.continued == []


def test_a_server_that_is_gone_is_not_waited_for() -> None:
    lease = pause_lease.PauseLease("http://127.0.0.1:9/go")
    lease.hold()
    start = time.monotonic()
    lease.close()
    assert time.monotonic() - start < pause_lease.LIMIT_S / 2
