"""Child processes under supervision: kinds of processes, the loop that restarts them, and the guard that restarts the
NATS server after its disk was full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.local.launch import Launch, Process, interpreter, service_environment
from penstock.local.leash import leashed
from penstock.local.ports import free_ports
from penstock.shared.errors import ConfigError, DeadlineError
from penstock.shared.transport.server import NatsServer, ValkeyServer

__all__ = [
    "Backoff",
    "Child",
    "DiskGuard",
    "KeptAlive",
    "LeashedNats",
    "LeashedValkey",
    "ServiceProcess",
    "ServiceRanks",
]

POLL_S = 0.1
STOP_S = 10.0
"""Deadline for the end of a server whose start was cancelled (seconds); then it is killed."""
LOG_BYTES = 64 << 20
"""Size above which a log file is renamed to ``.1`` when its process starts again."""
LAST_BYTES = 64 << 10
EXIT_CONFIG = 2
DISK_POLL_S = 2.0
"""Interval of the checks for errors of the NATS server, and for room on its disk (seconds)."""
FAILED_WRITE = "write error"
"""Text in the server's error for a stream that accepts no more messages after a failed write."""
DISK_PATIENCE = 15
"""Number of consecutive checks that must report an error other than FAILED_WRITE (such as JetStream being off) before
the server is restarted. A server that is still opening its store is left alone."""
DISK_SETTLE_S = 5.0
"""Time after a kill of the NATS server until the checks go on (seconds)."""
ROOM_BYTES = 8 << 20
"""Enough space for the server to start and to write for a while."""


class Child(Protocol):
    """A process that can be started again after it ended, with the same name and settings."""

    name: str

    @property
    def running(self) -> bool:
        """True if the process is alive."""
        ...

    @property
    def pid(self) -> int:
        """Process id; 0 before the first start. The value has no meaning while the process is stopped."""
        ...

    def start(self) -> None:
        """Start the process. The call blocks. Raises ConfigError, DeadlineError or OSError."""
        ...

    def stop(self, *, deadline_s: float) -> None:
        """Ask the process to end, and kill it at the deadline; block until it has ended."""
        ...


class LeashedNats(NatsServer):
    """A nats-server that the kernel kills when its supervisor dies."""

    def _command(self) -> list[str]:
        return leashed(super()._command())


class LeashedValkey(ValkeyServer):
    """A Valkey server that the kernel kills when its supervisor dies."""

    def _command(self) -> list[str]:
        return leashed(super()._command())


class ServiceProcess:
    """Runs ``python -m penstock.services.NAME``, with its log appended to ``LOG_DIR/WORKER.log``."""

    def __init__(
        self,
        service: str,
        worker: str,
        *,
        environment: Mapping[str, str],
        log_dir: Path,
        launch: Launch = interpreter,
    ) -> None:
        self.name = worker
        self.service = service
        self.log = log_dir / f"{worker}.log"
        self._environment = dict(environment)
        self._launch = launch
        self._process: Process | None = None

    @property
    def running(self) -> bool:
        """True if the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id; 0 before the first start."""
        return self._process.pid if self._process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process is alive or was never started."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        self._process = None  # forget the exit code of an earlier process
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as log:
            environment = service_environment(self.service, os.environ, self._environment)
            self._process = self._launch(f"penstock.services.{self.service}", environment, log)

    def ask_to_stop(self) -> None:
        """Send SIGTERM once, which requests a drain; a second signal would end the drain."""
        if self._process is not None:
            self._process.terminate()

    def stop(self, *, deadline_s: float) -> None:
        """Request a drain; kill the process and its children at the deadline."""
        self.ask_to_stop()
        self.end(deadline_s=deadline_s)

    def end(self, *, deadline_s: float) -> None:
        """Wait for the end of the process; kill it and its children at the deadline."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        try:
            os.killpg(process.pid, signal.SIGKILL)  # remaining processes of its session
        except ProcessLookupError:
            return

    def last_words(self) -> str:
        """Return the message of the last line of the log."""
        try:
            lines = self.log.read_bytes()[-LAST_BYTES:].decode("utf-8", "replace").strip().splitlines()
        except OSError:
            return ""
        return _message_of(lines[-1]) if lines else ""


class ServiceRanks:
    """Runs one service as a group of processes (ranks), with torchrun's environment variables.

    The group counts as ended as soon as one process ends. ``start`` then kills the others, and starts all processes
    again with another port.

    Args:
        workers: name of each rank; the name of rank 0 is also that of the group.
        environments: environment variables of each rank.
    """

    HOST = "127.0.0.1"

    def __init__(
        self,
        service: str,
        workers: Sequence[str],
        *,
        environments: Sequence[Mapping[str, str]],
        log_dir: Path,
        launch: Launch = interpreter,
    ) -> None:
        self.name, self.service = workers[0], service
        self._launch = launch
        self._workers, self._environments, self._log_dir = workers, environments, log_dir
        self._ranks: list[ServiceProcess] = []

    @property
    def running(self) -> bool:
        """True if all processes are alive."""
        return bool(self._ranks) and all(rank.running for rank in self._ranks)

    @property
    def pid(self) -> int:
        """Process id of rank 0; 0 before the first start."""
        return self._ranks[0].pid if self._ranks else 0

    @property
    def processes(self) -> dict[str, int]:
        """Process id of every rank by name."""
        return {rank.name: rank.pid for rank in self._ranks}

    @property
    def log(self) -> Path:
        """Path of the log of the rank that probably ended first; while all ranks are alive, of rank 0."""
        return self._first_to_end.log

    @property
    def exit_code(self) -> int | None:
        """Exit code of the rank that probably ended first, negative for a signal; None while all are alive."""
        return self._first_to_end.exit_code

    def start(self) -> None:
        """Kill processes left from an earlier start, and start all ranks."""
        for rank in self._ranks:
            rank.end(deadline_s=0)
        size, port = len(self._workers), free_ports(1, self.HOST)[0]
        together = {"WORLD_SIZE": str(size), "MASTER_ADDR": self.HOST, "MASTER_PORT": str(port)}
        if sys.platform == "linux":
            together["GLOO_SOCKET_IFNAME"] = "lo"
        self._ranks = [
            ServiceProcess(
                self.service, worker, log_dir=self._log_dir, launch=self._launch,
                environment={**environment, **together, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, (worker, environment) in enumerate(zip(self._workers, self._environments, strict=True))
        ]  # fmt: skip
        for rank in self._ranks:
            rank.start()

    def stop(self, *, deadline_s: float) -> None:
        """Request a drain of all ranks; kill them at the deadline."""
        deadline = time.monotonic() + deadline_s
        for rank in self._ranks:
            rank.ask_to_stop()
        for rank in self._ranks:
            rank.end(deadline_s=max(0.0, deadline - time.monotonic()))

    def last_words(self) -> str:
        """Return the message of the last line in the log of the rank that probably ended first."""
        return self._first_to_end.last_words()

    @property
    def _first_to_end(self) -> ServiceProcess:
        """Rank that probably ended first: a rank that a signal killed, if there is one, because the other ranks then
        end with an error."""
        ended = [rank for rank in self._ranks if not rank.running]
        return min(ended or self._ranks[:1], key=lambda rank: rank.exit_code or 0)


def _message_of(line: str) -> str:
    """Return the message of a JSON log line with the last line of its traceback; return other lines unchanged."""
    try:
        record = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return line
    error = str(record.get("error", "")).strip().splitlines()
    return ": ".join([str(record.get("message", line)), *error[-1:]])


class Backoff:
    """Restart delays: 0.2 s, doubling to 5 s; reset after 10 s of uptime."""

    FIRST_S, LONGEST_S, HEALTHY_S = 0.2, 5.0, 10.0

    def __init__(self) -> None:
        self._next_s = self.FIRST_S

    def after(self, alive_s: float) -> float:
        """Return the seconds to wait after a process that lived for ``alive_s``."""
        if alive_s >= self.HEALTHY_S:
            self._next_s = self.FIRST_S
        pause, self._next_s = self._next_s, min(self._next_s * 2, self.LONGEST_S)
        return pause


class KeptAlive:
    """Starts a child, and restarts it whenever it ends, until cancelled.

    All children are started from the one thread of ``starter``, because a child is killed when the thread that started
    it ends.
    """

    def __init__(self, child: Child, starter: ThreadPoolExecutor, report: Callable[[str], None]) -> None:
        self.child = child
        self.restarts = 0
        self._starter, self._report = starter, report
        self._backoff = Backoff()

    async def start(self) -> None:
        """Start the child for the first time. Raises ConfigError, DeadlineError or OSError.

        If cancelled, stop a server that is still starting, and wait until the start has ended. A process that runs
        then needs a call of ``stop``.
        """
        started = asyncio.get_running_loop().run_in_executor(self._starter, self.child.start)
        try:
            await asyncio.shield(started)
        except asyncio.CancelledError:
            while not started.done():
                if isinstance(self.child, NatsServer | ValkeyServer):
                    await self.stop(STOP_S)
                await asyncio.wait([started], timeout=POLL_S)
            await asyncio.gather(started, return_exceptions=True)
            raise

    async def keep(self, on_restart: Callable[[], None]) -> None:
        """Restart the child until cancelled. Raises ConfigError when a service ends because of its configuration."""
        began = time.monotonic()
        while True:
            await self._end_of_child()
            alive_s = time.monotonic() - began
            self._check(alive_s)
            pause = self._backoff.after(alive_s)
            self._report(
                f"{self.child.name} {self._describe_exit()} after {alive_s:.1f} s; starting it again in {pause:.1f} s"
            )
            await asyncio.sleep(pause)
            began = time.monotonic()
            self.restarts += 1
            try:
                await self.start()
            except (ConfigError, DeadlineError, OSError) as error:
                self._report(f"{self.child.name} did not start: {error}")
                continue
            try:
                on_restart()
            except OSError as error:
                self._report(f"{self.child.name} runs again, but that is not written down: {error}")

    async def stop(self, deadline_s: float) -> None:
        """Stop the child. Any thread may stop a child, although only the thread of the executor ``starter`` may start
        it."""
        await asyncio.to_thread(partial(self.child.stop, deadline_s=deadline_s))

    async def _end_of_child(self) -> None:
        while self.child.running:
            await asyncio.sleep(POLL_S)

    def _check(self, alive_s: float) -> None:
        child = self.child
        if not isinstance(child, (ServiceProcess, ServiceRanks)) or alive_s >= Backoff.HEALTHY_S:
            return
        if child.exit_code == EXIT_CONFIG:
            raise ConfigError(f"{child.name} cannot run as configured: {child.last_words()} (log: {child.log})")

    def _describe_exit(self) -> str:
        code = self.child.exit_code if isinstance(self.child, (ServiceProcess, ServiceRanks)) else None
        if code is None:
            return "ended"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        assert isinstance(self.child, (ServiceProcess, ServiceRanks))
        return f"ended with code {code} ({self.child.last_words()})"


class DiskGuard:
    """Kills the NATS server of this machine once its full disk has room again; the supervisor then restarts the server.

    A stream whose write failed accepts no message, even after there is room, until the server reads its files again.
    The files contain all acknowledged messages. Publishers retry the requests that fail meanwhile.

    ``report`` receives messages about what the guard does.
    """

    def __init__(self, nats: NatsServer, report: Callable[[str], None]) -> None:
        self._nats, self._report = nats, report

    async def run(self) -> None:
        """Run until cancelled: whenever the server reports a fault, wait for disk space, then kill the server, which is
        then restarted."""
        while True:
            self._report(
                f"nats: {await self._flaw()}; it is started again once there is room in {self._nats.directory}"
            )
            while not await asyncio.to_thread(_has_room, self._nats.directory):
                await asyncio.sleep(DISK_POLL_S)
            self._report("nats: there is room; starting it again")
            self._end()
            await asyncio.sleep(DISK_SETTLE_S)

    async def _flaw(self) -> str:
        times = 0
        while True:
            await asyncio.sleep(DISK_POLL_S)
            flaw = "" if self._nats.starting else await asyncio.to_thread(self._nats.flaw)
            times = times + 1 if flaw else 0
            if FAILED_WRITE in flaw or times >= DISK_PATIENCE:
                return flaw

    def _end(self) -> None:
        """Kill the server with SIGKILL. A clean stop could write the remains of a failed write from memory to the
        disk."""
        if self._nats.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._nats.pid, signal.SIGKILL)


def _has_room(folder: Path) -> bool:
    """Return True if ROOM_BYTES can be written to ``folder``, which also checks quotas. Blocks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
