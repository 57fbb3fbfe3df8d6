"""Process that imports the classes of a job's stateful tools once and forks a child for each episode.

Thus each episode's state has its own process, which can be killed. A fork takes less time than starting an interpreter.
Started by ``template.py`` as ``python -m penstock.services.env.tools.forks FD PARENT TOOLS``. Requests over FD:
``fork``, sent with the child's end of a channel and answered by the child's id or an error, and ``end PID``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
from typing import Any

from pydantic import TypeAdapter

from penstock.services.env.tools.answering import Toolbox, attempt, describe
from penstock.services.env.tools.channel import encode, read
from penstock.services.env.tools.objects import Method, Objects, load_classes
from penstock.shared.config.tools import MethodTool
from penstock.shared.errors import ToolError
from penstock.shared.runtime.user_process import die_with

__all__ = ["main"]

_MAX_WORDS = 64


def main() -> None:
    """Open the tools and send ``{"error": TEXT}``, with '' for success; then serve until the channel closes."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    die_with(parent, "env")
    with socket.socket(fileno=descriptor) as control:
        configs = TypeAdapter(list[MethodTool]).validate_json(sys.argv[3])
        classes, error = dict[str, Any](), ""
        try:
            classes = load_classes(configs)
        except ToolError as problem:
            error = str(problem)
        except (Exception, SystemExit) as problem:  # user code may raise anything on import
            error = describe("opening the tools", problem)
        control.send(json.dumps({"error": error}).encode())
        _fork_on_request(control, configs, classes)


def _fork_on_request(control: socket.socket, configs: list[MethodTool], classes: dict[str, Any]) -> None:
    children: set[int] = set()
    """Children that were not reaped yet, so that no other process can have their ids."""
    own = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_WORDS, 1)
        if not data:
            return
        word, _, number = data.decode().partition(" ")
        if word == "end":
            _end(int(number), children)
            continue
        try:
            pid = os.fork()
        except OSError as error:  # out of processes or memory: running children continue
            os.close(descriptors[0])
            control.send(f"no process can be forked: {error}".encode())
            continue
        if pid == 0:
            control.close()
            _live(descriptors[0], own, configs, classes)
        os.close(descriptors[0])
        children.add(pid)
        control.send(str(pid).encode())


def _end(pid: int, children: set[int]) -> None:
    """Kill a child and the processes that it started."""
    if pid not in children:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # it may not lead a group yet
    os.waitpid(pid, 0)
    children.remove(pid)


def _live(descriptor: int, parent: int, configs: list[MethodTool], classes: dict[str, Any]) -> None:
    """Run one episode in a child. Does not return."""
    try:
        os.setsid()
        die_with(parent, "env")
        with socket.socket(fileno=descriptor) as channel:
            _serve(channel, configs, classes)
    finally:
        sys.stdout.flush()
        os._exit(0)


def _serve(channel: socket.socket, configs: list[MethodTool], classes: dict[str, Any]) -> None:
    first = read(channel)
    if first is None:
        return
    objects = Objects(classes, first["seed"], first["row"])
    tools = Toolbox(configs, lambda config: Method(config, objects))
    while (request := read(channel)) is not None:
        if "answer" in request:
            reply = attempt("reward", functools.partial(_judged, objects, request["answer"]))
        elif "close" in request:
            reply = attempt("closing", functools.partial(_closed, objects))
        else:
            reply = tools.answer(request)
        channel.sendall(encode(reply))


def _closed(objects: Objects) -> str:
    objects.close()
    return ""


def _judged(objects: Objects, answer: str) -> str:
    return repr(objects.reward(answer))


if __name__ == "__main__":
    main()
