"""Systems in processes of their own that work only when it is their turn, and the clock of each.

    parent                               process of a system
      |  <- {"resident_bytes": ...}        loaded; waits
      |  "5\n" ->                          makes five steps
      |  <- {"seconds": [...], ...}        waits
      |  end of input ->                   exits

Free of any framework: TRL's environment imports this file too.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["System", "Turn", "Turns"]

TIMEOUT_S = 1800.0


@dataclass
class Turn:
    """Measurements of a system in one turn.

    ``resident_bytes`` is its memory now, ``peak_bytes`` the most it ever was; ``facts`` is what it noted last.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    resident_bytes: int = 0
    peak_bytes: int = 0


class Turns:
    """The side of the system: ``while turns.begin(): step(); turns.end()``.

    Args:
        settle: returns when the device has finished what it was given.
        rest: called at the end of a turn, outside the clock: gives the others the memory that is only cached.
    """

    def __init__(self, settle: Callable[[], object] = lambda: None, rest: Callable[[], object] = lambda: None) -> None:
        self._settle, self._rest = settle, rest
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what libraries print is no reply
        self._turn, self._left = Turn(), 0
        self._began = self._cpu_began = 0.0

    def begin(self) -> bool:
        """Wait for the next turn where one is over, then start the clock. False: there is no further turn."""
        if not self._left:
            self._rest()
            self._tell()
            line = sys.stdin.readline()
            if not line:
                return False
            self._left = int(line)
        self._cpu_began, self._began = time.process_time(), time.perf_counter()
        return True

    def end(self) -> None:
        """Stop the clock."""
        self._settle()
        self._turn.seconds.append(time.perf_counter() - self._began)
        self._turn.cpu_s.append(time.process_time() - self._cpu_began)
        self._left -= 1

    def note(self, **facts: float) -> None:
        """Facts of the step just made; outside the clock."""
        self._turn.facts.update(facts)

    def _tell(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._turn.resident_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        self._turn.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._replies.write(json.dumps(asdict(self._turn)) + "\n")
        self._turn = Turn()


class System:
    """The side of the parent: starts the process.

    Args:
        log: where its standard error goes.
    """

    def __init__(self, command: list[str], *, environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def loaded(self) -> Turn:
        """Wait until it can begin; call it once, before the first turn. Raises as ``turn``."""
        return self._reply()

    def turn(self, steps: int) -> Turn:
        """Let it make ``steps`` steps. SystemExit with the end of its log if it fails or takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()

    def _reply(self) -> Turn:
        assert self._process.stdout is not None
        deadline = threading.Timer(TIMEOUT_S, self._process.kill)
        deadline.start()
        line = self._process.stdout.readline()
        deadline.cancel()
        if not line:
            self._process.wait()
            raise SystemExit(f"{self._log.stem} failed:\n{self._log.read_text()[-4000:]}")
        return Turn(**json.loads(line))
