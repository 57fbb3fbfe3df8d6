"""Messages between handle, warden and run: limits, means of containment, one job, its outcome."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["READY", "START_LIMIT_S", "STOP", "Job", "Mechanism", "Plan", "Verdict"]

Mechanism = Literal["namespaces", "landlock"]
"""`namespaces`: own mounts, network, process ids, scratch directory; `landlock`: one process, no file changes."""

READY = b"ready\n"
"""A run writes this once it is contained, before it looks at the program."""

START_LIMIT_S = 30.0
"""For the warden to start, and for a run to be contained."""

STOP = b"stop"
"""The handle sends this where a run is to end at once."""


class Plan(NamedTuple):
    """Fixed for the life of a warden."""

    mechanism: Mechanism
    parent: int
    """Process id of the handle's process."""
    readable: list[str]
    """Directories that a program may read."""
    packages: list[str]
    """Directories put on the program's import path after the standard library."""
    preload: list[str]
    """Modules that are imported before runs are forked."""
    cpu_s: int
    memory_bytes: int
    scratch_bytes: int
    max_processes: int

    @property
    def single(self) -> bool:
        """A program may not start processes."""
        return self.max_processes == 1


class Job(NamedTuple):
    """The program of a run. ``steps`` empty: run the program as a script, standard input to standard output."""

    program: str
    steps: list[dict[str, Any]]
    nonce: str
    """Written beside each result of a step; a program that prints results of its own does not know it."""
    role: Literal["", "program", "judge"] = ""
    """Of two runs that are joined by pipes: the one that answers for the program, or the one that takes the steps."""


class Verdict(NamedTuple):
    """How a run ended: by itself, by a signal, or because its time was over."""

    ending: Literal["exit", "signal", "time"]
    status: int
    """Exit status or number of the signal."""
