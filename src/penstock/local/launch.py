"""How the process of a service is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import IO, Protocol, TypeAlias

from penstock.local.leash import leashed

__all__ = ["Launch", "Process", "interpreter"]


class Process(Protocol):
    """The part of ``subprocess.Popen`` that a supervisor uses. The process id is also that of its session."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None while it lives."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """How it ended. Raises subprocess.TimeoutExpired."""
        ...

    def terminate(self) -> None:
        """Ask it to end; nothing where it ended already."""
        ...

    def kill(self) -> None:
        """End it; nothing where it ended already."""
        ...


Launch: TypeAlias = Callable[[str, Mapping[str, str], IO[bytes]], Process]
"""``launch(module, environment, log)`` runs a module as a program that dies with whoever starts it. ``environment`` is
all that it gets; ``log`` is its standard output and error."""


def interpreter(module: str, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """A new interpreter, ``python -m module``. It lives no longer than the thread that starts it."""
    return subprocess.Popen(
        leashed([sys.executable, "-m", module]),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then stops things in order
    )
