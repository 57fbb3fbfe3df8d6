"""Stands for ``python`` where a nursery forked: a replay is forked there, too; anything else is run as always.

``nursery_python.py SOCKET -m MODULE ARGUMENTS``, with the socket of the nursery. It imports next to nothing, so that it
is there at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FORKED = ("penstock.services.trainer.replay",)
WORD_BYTES = 16


def run(path: str, module: str, arguments: list[str]) -> int:
    """Have the nursery run a module with this environment and output; returns how it ended, negative for a signal."""
    environment, directory = dict(os.environ), os.getcwd()  # noqa: PTH109  pathlib would take longer than all the rest
    order = {"program": module, "arguments": arguments, "environment": environment, "directory": directory}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
        nursery.connect(path)
        socket.send_fds(nursery, [json.dumps(order).encode()], [2])
        nursery.recv(WORD_BYTES)  # its process id
        return int(nursery.recv(WORD_BYTES) or -signal.SIGKILL)


def main() -> None:
    """Ends as what it runs does."""
    path, *words = sys.argv[1:]
    if words[:1] != ["-m"] or words[1] not in FORKED:
        os.execv(sys.executable, [sys.executable, *words])
    code = run(path, words[1], words[2:])
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
