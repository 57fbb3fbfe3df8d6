"""Processes that are ranks, kept for many tests: ``python rank_pool.py`` reads tasks from its standard input.

A task names a function in a file. The ranks of the task meet, each calls the function with its ``World`` and the
arguments, and what it returns goes back; then they part.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import pickle
import signal
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
        self._processes: list[subprocess.Popen[str]] = []
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
        for rank, process in enumerate(self._processes[:size]):
            task = {
                "file": function.__code__.co_filename, "function": function.__qualname__, "directory": str(directory),
                "environment": {
                    "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                },
            }  # fmt: skip
            assert process.stdin is not None
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        return [self._result(rank) for rank in range(size)]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()
        self._directory.cleanup()

    def _start(self, size: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        for _ in range(size - len(self._processes)):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

    def _result(self, rank: int) -> Any:
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self.close()
            raise RankError(f"rank {rank} ended with {process.poll()}")
        result = pickle.loads((Path(self._directory.name) / f"result{rank}").read_bytes())
        if line.strip() != "done":
            self.close()
            raise RankError(f"rank {rank}:\n{result}")
        return result


def _serve() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is not an answer
    import torch

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for line in sys.stdin:
        task = json.loads(line)
        os.environ.update(task["environment"])
        directory = Path(task["directory"])
        try:
            result, answer = _carry_out(task, directory), "done"
        except BaseException:
            result, answer = traceback.format_exc(), "failed"
        (directory / f"result{task['environment']['RANK']}").write_bytes(pickle.dumps(result))
        answers.write(answer + "\n")
        answers.flush()


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
    _serve()
