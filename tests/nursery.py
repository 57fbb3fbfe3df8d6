"""Processes that start with their imports already done.

``python nursery.py <socket>`` imports the modules that services and ranks of a trainer need, which takes seconds, and
forks a program for each order that it receives. A forked program runs like any other process: it has its own
environment, session, log and exit code, and can be stopped and killed. It ends with the nursery at the latest.

The interpreter with which a forked trainer starts a replay is ``nursery_python.py``, which has the nursery fork the
replay. Pytest processes that share the whole suite are forked here, too: one nursery serves all of them
(``conftest.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

IMPORTED = (
    "penstock.services.coordinator.service",
    "penstock.services.env.service",
    "penstock.services.reward.service",
    "penstock.services.rollout.service",
    "penstock.services.trainer.service",
    "penstock.services.trainer.backends.fsdp.backend",
    "penstock.services.trainer.backends.megatron.backend",
    "penstock.services.trainer.optimizer",
    "torch._dynamo",  # every optimizer imports it at its first use
    "transformers.models.auto.modeling_auto",
)
ORDER_BYTES, WORD_BYTES = 128 << 10, 16
WAIT_S = 0.01
PR_SET_PDEATHSIG = 1
SOCKET = "socket"
INTERPRETER = Path(__file__).with_name("nursery_python.py")


class Nursery:
    """Client of a nursery: of the one in ``directory`` if given, or else of its own, started with the first program."""

    def __init__(self, directory: str = "") -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._own = None if directory else tempfile.TemporaryDirectory(prefix="penstock-nursery-")
        self.directory = Path(directory or self._own.name)  # type: ignore[union-attr]

    @property
    def interpreter(self) -> Path:
        """Return the path of a program to use as ``python``: a shell script that runs ``nursery_python.py``."""
        return self.directory / "python"

    def launch(self, module: str, environment: Mapping[str, str], log: IO[bytes]) -> Forked:
        """Run a service's module in a forked process; for use as ``penstock.local.launch.Launch``."""
        return self.run(module, environment=environment, output=log.fileno())

    def run(
        self, program: str, *arguments: str, environment: Mapping[str, str], output: int = 2,
        channel: socket.socket | None = None,
    ) -> Forked:  # fmt: skip
        """Fork a process that runs a module, or a file if ``program`` ends in ``.py``.

        Args:
            environment: all environment variables of the process.
            output: descriptor for standard output and standard error.
            channel: socket for the program, which gets the number of its descriptor as the first argument.
        """
        order = {
            "program": program, "arguments": arguments, "environment": dict(environment), "directory": str(Path.cwd()),
        }  # fmt: skip
        descriptors = [output, *([channel.fileno()] if channel else [])]
        if self._own is None:
            news = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            news.connect(str(self.directory / SOCKET))
            socket.send_fds(news, [json.dumps(order).encode()], descriptors)
            return Forked(news)
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._turn, its:
            self.start()
            socket.send_fds(self._orders, [json.dumps(order).encode()], [its.fileno(), *descriptors])
        return Forked(ours)

    def close(self) -> None:
        """End this client's own nursery with all processes that it forked; leave another process's nursery running."""
        if self._process is not None:
            self._orders.close()
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._own is not None:
            self._own.cleanup()

    def start(self) -> None:
        """Start the nursery, once. Its socket accepts connections from now on, and answers after the imports."""
        if self._process is not None:
            return
        make_interpreter(self.directory)
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # the default check breaks CUDA in a fork
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.directory / SOCKET))
            listener.listen()
            passed = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, __file__, *map(str, passed), str(self.interpreter)],
                pass_fds=passed, env=environment, start_new_session=True,
            )  # fmt: skip


class Forked:
    """A forked process, with the methods of ``subprocess.Popen``."""

    def __init__(self, news: socket.socket) -> None:
        """Wait for the process id, the first message on ``news``; the last one is the exit code."""
        self._news, self._looking = news, threading.Lock()
        self._code: int | None = None
        self.pid = int(news.recv(WORD_BYTES) or 0)
        assert self.pid, "the nursery ended"

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        with self._looking, contextlib.suppress(BlockingIOError):
            if self._code is None:
                word = self._news.recv(WORD_BYTES, socket.MSG_DONTWAIT)
                self._code = int(word or -signal.SIGKILL)  # the process ended with the nursery
                self._news.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(WAIT_S)
        return code

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def serve(orders: socket.socket, listener: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each order.

    Returns the order in the forked process, which has to carry it out, and None in the nursery when no client is left.
    A client that connects to ``listener`` gets the process id and exit code over that connection; the forked process is
    killed when the connection closes.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    alive: dict[int, socket.socket] = {}
    tied: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([orders, woken, listener, *tied.values()], [], [])
        if woken in ready:
            os.read(woken, 4096)
            report_ended(alive)
        end_forsaken(tied, alive, ready)
        data, descriptors = next_order(orders, listener, ready)
        if data is None:
            return None
        if not data:
            continue
        news, *descriptors = descriptors
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for connection in (orders, listener, *alive.values()):
                connection.close()
            for descriptor in (woken, wake, news):
                os.close(descriptor)
            die_with(parent)
            return {**json.loads(data), "descriptors": descriptors}
        alive[pid] = socket.socket(fileno=news)
        send_number(alive[pid], pid)
        if listener in ready:
            tied[pid] = alive[pid]
        for descriptor in descriptors:
            os.close(descriptor)


def report_ended(alive: dict[int, socket.socket]) -> None:
    """Send the exit code of each process that has ended to its client."""
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with alive.pop(pid) as news:
            send_number(news, os.waitstatus_to_exitcode(status))


def send_number(news: socket.socket, number: int) -> None:
    """Send a number to a client that may already be gone."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        news.send(b"%d" % number)


def next_order(orders: socket.socket, listener: socket.socket, ready: Sequence[Any]) -> tuple[bytes | None, list[int]]:
    """Return an order, b"" if there is none, and descriptors: one for messages to the client, then the process's own.

    None as the order means that no client is left to send one.
    """
    if listener in ready:
        connection, _ = listener.accept()
        data, descriptors, _, _ = socket.recv_fds(connection, ORDER_BYTES, 8)
        return data, [connection.detach(), *descriptors] if data else []
    if orders in ready:
        data, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES, 8)
        return data or None, descriptors
    return b"", []


def end_forsaken(tied: dict[int, socket.socket], alive: Mapping[int, socket.socket], ready: Sequence[Any]) -> None:
    """Kill each process whose client closed its connection, and remove ended processes from ``tied``."""
    for pid in [pid for pid in tied if pid not in alive or tied[pid] in ready]:
        if pid in alive:
            os.kill(pid, signal.SIGKILL)
        del tied[pid]


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, as ``penstock.local.leash`` does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def become(order: Mapping[str, Any]) -> None:
    """Turn this process into the program of an order."""
    output, *channel = order["descriptors"]
    os.setsid()
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if "code" in order:
        become_interpreter(order["code"], output, *channel)
        return
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    program = order["program"]
    sys.argv = [program, *map(str, channel), *order["arguments"]]
    if program == "penstock.services.trainer":
        sys.executable = order["interpreter"]
    sys.path[0:1] = [order["directory"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def become_interpreter(code: str, *streams: int) -> None:
    """Run ``code`` as ``python -c`` would; ``streams`` are descriptors for its standard error, input and output."""
    for descriptor, standard in zip(streams, (2, 0, 1), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.argv = ["-c"]
    sys.path[0] = ""
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))


def imports(names: Sequence[str]) -> None:
    """Import the modules that are installed."""
    gc.disable()  # collections of new objects would take half of the time
    from penstock.shared.errors import ConfigError

    for name in names:
        try:
            importlib.import_module(name)
        except ConfigError:  # a library of an extra is not installed
            continue
    gc.collect()
    gc.freeze()  # else the first collection would copy the memory that all forks share
    gc.enable()


def make_interpreter(directory: Path) -> None:
    """Write the program ``python`` into ``directory``; it sends its orders to the nursery's socket there."""
    words = [sys.executable, "-IS", str(INTERPRETER), str(directory / SOCKET)]
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)


def main() -> None:
    """Run the nursery, and, in each process that it forks, the ordered program."""
    orders, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    interpreter = sys.argv[3]
    imports(IMPORTED)
    order = serve(orders, listener)
    if order is not None:
        end_with(lambda: become({**order, "interpreter": interpreter}))


def end_with(program: Callable[[], None]) -> None:
    """Run a program and end this process as the interpreter would, but leave the memory to the kernel.

    An interpreter that ends frees every object of every module. In a fork of the nursery each of those frees copies a
    page that was shared until then, which takes half a second.
    """
    code: int | str | None = 0
    try:
        program()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
