"""Pool of rank processes that serve many tests.

A rank process runs this file with the descriptor of a socket. A task on that socket names a function in a file. The
ranks of a task join a process group; each calls the function with its ``World`` and the arguments, sends back the
result, and leaves the group.
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
    """Pool that starts ranks when a test first needs them."""

    def __init__(self, nursery: Any) -> None:
        self._nursery = nursery
        self._ranks: list[_Rank] = []
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-ranks-")

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(world, *args)`` on ``size`` ranks; return their results in rank order.

        The function stands at the top level of its file; arguments and results are picklable. Raises RankError.
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
            rank.send(json.dumps(task))
        return [self._result(number) for number in range(size)]

    def close(self) -> None:
        """End all ranks."""
        self._end_all()
        self._directory.cleanup()

    def _start(self, size: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        while len(self._ranks) < size:
            ours, its = socket.socketpair()
            with its:
                process = self._nursery.run(__file__, environment=environment, channel=its)
            self._ranks.append(_Rank(ours, process))

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


class _Rank:
    """A rank process, and this side of its socket."""

    def __init__(self, connection: socket.socket, process: Any) -> None:
        self._connection, self._lines = connection, connection.makefile("rw")
        self._process = process

    def send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the read of its answer notices a dead rank
            self._lines.write(line + "\n")
            self._lines.flush()

    def answer(self) -> str:
        """Return the rank's next line without its newline; '' once the rank has ended."""
        with contextlib.suppress(ConnectionResetError):
            return self._lines.readline().strip()
        return ""

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._lines.close()
        self._connection.close()


def _serve(connection: socket.socket) -> None:
    import torch

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    lines = connection.makefile("rw")
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
    from penstock.services.trainer.ranks.process_group import join, place_from_environment

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
    _serve(socket.socket(fileno=int(sys.argv[1])))
