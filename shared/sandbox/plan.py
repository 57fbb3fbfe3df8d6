"""Messages between three processes: the service that uses the sandbox (the handle), the warden, and a run."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["READY", "START_LIMIT_S", "STOP", "Job", "Mechanism", "Plan", "Verdict"]

Mechanism = Literal["namespaces", "landlock"]
"""`namespaces`: private mounts, network, process ids, scratch directory; `landlock`: one process, no file changes."""

READY = b"ready\n"
"""Line that a run writes to its results once it is contained, before it reads the program."""

START_LIMIT_S = 30.0
"""Time limit of starting the warden, and of containing a run (seconds)."""

STOP = b"stop"
"""Message by which the handle has the warden stop a run at once."""


class Plan(NamedTuple):
    """Settings of a warden, constant for its lifetime."""

    mechanism: Mechanism
    parent: int
    """Process id of the handle's process."""
    readable: list[str]
    """Directories that a program may read."""
    packages: list[str]
    """Directories appended to the program's import path after the standard library."""
    preload: list[str]
    """Modules that the warden imports before it forks runs."""
    cpu_s: int
    memory_bytes: int
    scratch_bytes: int
    max_processes: int

    @property
    def single(self) -> bool:
        """True if the program may not start processes."""
        return self.max_processes == 1


class Job(NamedTuple):
    """Program of a run, and steps (calls or statements) that are executed after the program. Without steps, the program
    runs as a script."""

    program: str
    steps: list[dict[str, Any]]
    nonce: str
    """Random text in each result of a step. Results that a program writes itself lack the text, and are ignored."""
    role: Literal["", "program", "judge"] = ""
    """Role in a pair of runs joined by pipes: `program` executes the program and answers requests, `judge` executes the
    steps. Empty: a run of its own."""


class Verdict(NamedTuple):
    """End of a run: by itself, by a signal, or by its time limit."""

    ending: Literal["exit", "signal", "time"]
    status: int
    """Exit status or number of the signal."""
