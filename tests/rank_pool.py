"""Processes that are ranks, kept for many tests.

``python rank_pool.py <socket>`` imports once what every rank needs and forks a rank each time it is sent a socket. A
task on that socket names a function in a file. The ranks of the task meet, each calls the function with its ``World``
and the arguments, and what it returns goes back; then they part.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK_DEADLINE_S = 60.0


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class RankPool:
    """Starts ranks when they are first needed."""

    def __init__(self) -> None:
        self._nursery: subprocess.Popen[bytes] | None = None
        self._ranks: list[_Rank] = []
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-ranks-")

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(world, *args)`` on ``size`` ranks; what each returned, in rank order.

        The function stands at the top level of its file; arguments and results are picklable.
        """
        from penstock.local.ports import free_ports

        self._start(size)
        directory = Path(self._directory.name)
        (directory / "args").write_bytes(pickle.dumps(args))
        port = free_ports(1)[0]
        for number, rank in enumerate(self._ranks[:size]):
            task = {
                "file": function.__code__.co_filename, "function": function.__qualname__, "directory": str(directory),
                "environment": {
                    "RANK": str(number), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                },
            }  # fmt: skip
            rank.tell(json.dumps(task))
        return [self._result(number) for number in range(size)]

    def close(self) -> None:
        """End them."""
        self._end_all()
        self._directory.cleanup()

    def _start(self, size: int) -> None:
        if self._nursery is None:
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other check breaks CUDA in forked processes
            }  # fmt: skip
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                environment.pop(name, None)
            self._orders, theirs = socket.socketpair()
            with theirs:
                self._nursery = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
                )
        while len(self._ranks) < size:
            ours, its = socket.socketpair()
            with its:
                socket.send_fds(self._orders, [b"."], [its.fileno()])
            self._ranks.append(_Rank(ours))

    def _result(self, number: int) -> Any:
        answer = self._ranks[number].answer()
        if not answer:
            self._end_all()
            raise RankError(f"rank {number} ended")
        result = pickle.loads((Path(self._directory.name) / f"result{number}").read_bytes())
        if answer != "done":
            self._end_all()
            raise RankError(f"rank {number}:\n{result}")
        return result

    def _end_all(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()
        if self._nursery is not None:
            self._orders.close()
            self._nursery.kill()
            self._nursery.wait()
            self._nursery = None


class _Rank:
    """The other end of a rank's socket; it says its process id first."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("rw")
        self._pid: int | None = None

    def tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a dead rank is noticed when its answer is read
            self._lines.write(line + "\n")
            self._lines.flush()

    def answer(self) -> str:
        """The next line without its end; empty once the rank is gone."""
        with contextlib.suppress(ConnectionResetError):
            if self._pid is None:
                self._pid = int(self._lines.readline() or 0) or None
            return self._lines.readline().strip()
        return ""

    def end(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._lines.close()
        self._connection.close()


def _fork_ranks(orders: socket.socket) -> None:
    """One rank for each socket that is received."""
    import torch

    from penstock.services.trainer.backends.fsdp import backend as _
    from penstock.shared.errors import ConfigError

    with contextlib.suppress(ConfigError):  # megatron-core is optional
        from penstock.services.trainer.backends.megatron import backend as _

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        data, received, _, _ = socket.recv_fds(orders, 1, 1)
        if not data:
            return
        if os.fork():
            os.close(received[0])
            continue
        orders.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _serve(socket.socket(fileno=received[0]))
        return


def _serve(connection: socket.socket) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    lines = connection.makefile("rw")
    lines.write(f"{os.getpid()}\n")
    lines.flush()
    for line in lines:
        task = json.loads(line)
        os.environ.update(task["environment"])
        directory = Path(task["directory"])
        try:
            result, answer = _carry_out(task, directory), "done"
        except BaseException:
            result, answer = traceback.format_exc(), "failed"
        (directory / f"result{task['environment']['RANK']}").write_bytes(pickle.dumps(result))
        lines.write(answer + "\n")
        lines.flush()


def _carry_out(task: dict[str, Any], directory: Path) -> Any:
    from penstock.services.trainer.process_group import join, place_from_environment

    path = Path(task["file"])
    name = f"on_rank_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    function = getattr(sys.modules[name], task["function"])
    world = join(place_from_environment(), deadline_s=RANK_DEADLINE_S)
    try:
        return function(world, *pickle.loads((directory / "args").read_bytes()))
    finally:
        world.leave()


if __name__ == "__main__":
    _fork_ranks(socket.socket(fileno=int(sys.argv[1])))
