"""Interpreter that has the nursery fork a replay or a pytest-xdist process, and runs everything else like ``python``.

``nursery_python.py SOCKET -m MODULE ARGUMENTS`` or ``nursery_python.py SOCKET -u -c CODE``, with the socket of the
nursery. This file imports next to nothing, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FORKED = ("penstock.services.trainer.replay",)
WORD_BYTES = 16


def order_of(words: list[str]) -> tuple[dict[str, object], list[int]] | None:
    """Return an order for the nursery and the descriptors to send with it; None for programs that it does not fork."""
    if words[:1] == ["-m"] and words[1] in FORKED:
        return {"program": words[1], "arguments": words[2:]}, [2]
    if words[:2] == ["-u", "-c"] and len(words) == 3:
        return {"code": words[2]}, [2, 0, 1]
    return None


def run(path: str, order: dict[str, object], descriptors: list[int]) -> int:
    """Have the nursery run an order with this process's environment; return the exit code, negative for a signal."""
    environment, directory = dict(os.environ), os.getcwd()  # noqa: PTH109  pathlib would take longer than all the rest
    data = json.dumps({**order, "environment": environment, "directory": directory}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
        nursery.connect(path)
        socket.send_fds(nursery, [data], descriptors)
        nursery.recv(WORD_BYTES)  # its process id
        return int(nursery.recv(WORD_BYTES) or -signal.SIGKILL)


def main() -> None:
    """Run the program, and end with the same exit code or signal."""
    path, *words = sys.argv[1:]
    ordered = order_of(words)
    if ordered is None:
        os.execv(sys.executable, [sys.executable, *words])
    code = run(path, *ordered)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
