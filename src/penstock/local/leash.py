"""Starts a program that dies with its parent: ``python leash.py PARENT_PID PROGRAM ARG...``.

The link to the parent is set before exec, so it also works for third-party programs. Linux only; elsewhere the program
just starts, and only the supervisor's own clean-up ends it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = ["leashed"]

PR_SET_PDEATHSIG = 1


def leashed(command: list[str]) -> list[str]:
    """Return ``command``, changed so that the kernel kills the program when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *command]


def _main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call above
            os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
