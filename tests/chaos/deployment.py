"""A deployment as `penstock up` starts it, in which faults can change clocks, cut connections and fill the disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from penstock.client import Client
from penstock.local import Stack, StackOptions
from penstock.local.launch import Process, interpreter
from penstock.shared.config.service import CHECKPOINTS
from penstock.shared.errors import Unavailable
from penstock.shared.transport.bus import Bus
from tests.chaos.schedule import SKEWED, WORKERS, Fault

__all__ = ["Deployment", "Link"]

T = TypeVar("T")

API_KEY = "chaos-key"
CLOCK = Path(__file__).with_name("clock")
"""Folder of the `sitecustomize` that changes a clock."""
READY_S = 180.0
DISK_MIB = 1536
BLOCK = 1 << 16


class Link:
    """TCP proxy between one worker and NATS; while the link is cut, no data passes and no connection is closed."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.target = ("127.0.0.1", 0)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Accept connections."""
        self._server = await asyncio.start_server(self._serve, sock=self._listener)

    def close(self) -> None:
        """Accept no more connections, and let data pass again."""
        if self._server is not None:
            self._server.close()
        self.open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self.target)
        except OSError:
            writer.close()
            return
        pumps = {asyncio.create_task(self._pump(reader, back)), asyncio.create_task(self._pump(there, writer))}
        _, left = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in left:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in (back, writer):
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(BLOCK):
                await self.open.wait()
                writer.write(data)
                await writer.drain()


class Deployment:
    """A running stack on an event loop in a thread, its faults, and its streams.

    Args:
        directory: Parent of all files of the deployment.
        clocks: True if faults change the wall clocks of the services.
        small_disk: True if the data directory gets a file system of its own, which a fault can fill.
        keep: Folder for a copy of logs and streams at the end.
        say: Receives lines for people.
    """

    def __init__(
        self, directory: Path, *, clocks: bool, small_disk: bool, keep: Path | None = None, say: Callable[[str], None]
    ) -> None:
        self.directory, self.data_dir, self.shm = directory, directory / "data", directory / "shm"
        self.say, self.restarts = say, list[str]()
        self.damaged: set[str] = set()
        """Jobs of which a checkpoint was damaged: a deletion may fork them."""
        self._clocks, self._mounted, self._keep = clocks, False, keep
        for folder in (self.data_dir, self.shm):
            folder.mkdir(parents=True)
        if small_disk:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "tmpfs", str(self.data_dir)], check=True
            )
            self._mounted = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.links = self.run(self._open_links())
        environment = {
            "PENSTOCK_API_KEYS": API_KEY,
            "PENSTOCK_RATE_LIMIT": "1000000/minute",
            "PENSTOCK_LIVE_RATE_LIMIT": "1000000/minute",
            "PENSTOCK_SHM_DIR": str(self.shm),
            "PENSTOCK_EXPERIENCE_BYTES": str(128 << 20),
            "PENSTOCK_LEDGER_BYTES": str(64 << 20),
            "PENSTOCK_STREAM_BYTES": str(32 << 20),
        }
        options = StackOptions(
            data_dir=self.data_dir, environment=environment, workers={"rollout": 2, "env": 0}, drain_s=10,
            launch=self._launch,
        )  # fmt: skip
        self.stack = Stack(options, self._record_restart)

    def __enter__(self) -> Deployment:
        try:
            self.run(self.stack.__aenter__(), READY_S)
            self.run(self.stack.ready(deadline_s=READY_S), READY_S + 10)
        except BaseException:
            self.close()
            raise
        self.client = Client(self.stack.url, api_key=API_KEY, retries=20)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.close()

    def close(self) -> None:
        """Stop every process and the thread, and unmount the disk."""
        self.run(self.stack.close(), READY_S)
        for link in self.links.values():
            self._loop.call_soon_threadsafe(link.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        try:
            if self._keep is not None:
                shutil.copytree(self.directory, self._keep, dirs_exist_ok=True, ignore=_sockets)
        finally:
            if self._mounted:
                subprocess.run(["umount", "--lazy", str(self.data_dir)], check=True)

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 120.0) -> T:
        """Run a coroutine on the event loop of the stack; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def on_bus(self, ask: Callable[[Bus], Awaitable[T]]) -> T:
        """Connect to the bus of this stack; return the result of ``ask``."""

        async def go() -> T:
            async with await Bus.connect(str(self.stack._nats_url), name="chaos") as bus:
                return await ask(bus)

        return self.run(go())

    def until(self, true: Callable[[], Any], what: str, seconds: float) -> Any:
        """Wait for a true value of ``true()``, and return it. Raises TimeoutError with ``what``."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(Unavailable):
                if found := true():
                    return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:g} s")
            time.sleep(0.2)

    # -- how processes are started -----------------------------------------------------------------------------------

    async def _open_links(self) -> dict[str, Link]:
        links = {worker: Link() for worker in WORKERS}
        for link in links.values():
            await link.start()
        return links

    def _launch(self, module: str, environment: Mapping[str, str], log: IO[bytes]) -> Process:
        """Start a service as `penstock up` does, behind its link and with its clock."""
        worker, own = environment["PENSTOCK_WORKER_ID"], dict(environment)
        link = self.links.get(worker)
        if link is not None:
            url = urlsplit(own["PENSTOCK_NATS_URL"])
            link.target = (url.hostname or "127.0.0.1", url.port or 4222)
            login, at, _ = url.netloc.rpartition("@")
            own["PENSTOCK_NATS_URL"] = urlunsplit(url._replace(netloc=f"{login}{at}127.0.0.1:{link.port}"))
        if self._clocks and worker in SKEWED:
            self.set_clock(worker, 0)
            own["CHAOS_CLOCK"] = str(self._clock_file(worker))
            own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CLOCK), own.get("PYTHONPATH")]))
        return interpreter(module, own, log)

    def _record_restart(self, line: str) -> None:
        self.restarts.append(line)

    def _clock_file(self, worker: str) -> Path:
        return self.directory / f"clock-{worker}"

    def set_clock(self, worker: str, skew_s: int) -> None:
        """Shift the wall clock of a worker by ``skew_s``, from about half a second from now on."""
        new = self._clock_file(worker).with_suffix(".new")
        new.write_text(str(skew_s))
        new.replace(self._clock_file(worker))

    # -- faults ------------------------------------------------------------------------------------------------------

    def commit(self, fault: Fault, jobs: list[str]) -> str:
        """Cause a fault, and repair what a person would repair; return a remark for the output."""
        carry_out: Callable[[Fault, str], str] = getattr(self, f"_{fault.kind}")
        return carry_out(fault, jobs[fault.job] if fault.job >= 0 else "")

    def pid(self, name: str) -> int:
        """Return the current process id; 0 while the process is being restarted."""
        return self.stack.processes.get(name, 0)

    def _signal(self, name: str, number: int) -> None:
        if pid := self.pid(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill(self, fault: Fault, job: str) -> str:
        for name in fault.targets:
            self._signal(name, signal.SIGKILL)
        return ""

    _pair = _kill

    def _stop(self, fault: Fault, job: str) -> str:
        (name,) = fault.targets
        pid = self.pid(name)
        self._signal(name, signal.SIGSTOP)
        time.sleep(fault.seconds)
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGCONT)
        return ""

    def _clock(self, fault: Fault, job: str) -> str:
        self.set_clock(fault.targets[0], fault.skew_s)
        time.sleep(fault.seconds)
        self.set_clock(fault.targets[0], 0)
        return ""

    def _disk(self, fault: Fault, job: str) -> str:
        ballast = self.data_dir / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.data_dir).free)
                file.seek(0, os.SEEK_END)
                for size in (1 << 20, 4096, 1):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(size))
            time.sleep(fault.seconds)
        finally:
            ballast.unlink(missing_ok=True)
        return ""

    def _link(self, fault: Fault, job: str) -> str:
        link = self.links[fault.targets[0]]
        self._loop.call_soon_threadsafe(link.open.clear)
        time.sleep(fault.seconds)
        self._loop.call_soon_threadsafe(link.open.set)
        return ""

    def _slots(self, fault: Fault, job: str) -> str:
        self._signal(fault.targets[0], signal.SIGKILL)
        found = [path for path in self.shm.iterdir() if job in path.name]
        for path in found:
            path.unlink(missing_ok=True)
        return f"{len(found)} removed"

    def _checkpoint(self, fault: Fault, job: str) -> str:
        folder = self.data_dir / CHECKPOINTS / job
        complete = sorted(path.parent for path in folder.glob("[0-9]*-*/COMMIT"))
        if len(complete) < 3:
            return "too few to damage one"
        newest = complete[-1]
        weights = newest / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[random.Random(fault.number).randrange(len(data) // 2, len(data))] ^= 0xFF
        weights.write_bytes(data)
        self._signal("trainer-0", signal.SIGKILL)
        self.damaged.add(job)
        return f"checkpoint {newest.name} damaged"


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]
