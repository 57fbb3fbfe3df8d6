"""The workloads, free of any framework: TRL's environment imports this file too.

Both are additions ``a+b=`` for a character-level model of about one million parameters, 16 prompts x 8 completions.

* ``short``: one digit, at most 6 tokens, reward 1 for the right sum: learning, and what a system costs.
  Penstock does not compute sequences whose advantage is 0; their share grows as groups become all right.
* ``long``: two digits, exactly 64 tokens from random weights: speed only. Its reward is a hash of the completion, so
  every completion has an advantage and no system can leave a sequence out of the update.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "BATCH",
    "GROUP",
    "LEARNING_RATE",
    "PROMPTS",
    "WORKLOADS",
    "Run",
    "Step",
    "Workload",
    "exact_reward",
    "hash_reward",
    "reached",
    "read_run",
    "write_rows",
    "write_run",
]

PROMPTS, GROUP = 16, 8
BATCH = PROMPTS * GROUP
LEARNING_RATE = 1e-4
ROWS = 4096
MEAN_OVER = 10
"""A goal is reached when the mean reward of this many steps in a row is there."""


@dataclass(frozen=True)
class Workload:
    """``min_new_tokens``: no earlier end. TRL masks the end of sequence, the others take it for a token like others.

    ``reward`` names a function of this file.
    """

    name: str
    digits: int
    max_new_tokens: int
    min_new_tokens: int
    reward: str


WORKLOADS = {
    "short": Workload("short", digits=1, max_new_tokens=6, min_new_tokens=0, reward="exact_reward"),
    "long": Workload("long", digits=2, max_new_tokens=64, min_new_tokens=64, reward="hash_reward"),
}


def exact_reward(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
    """1 for the right sum."""
    return float(completion.strip() == answer)


def hash_reward(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
    """A number in [0, 1) that differs between completions."""
    return zlib.crc32(completion.encode()) / 2**32


def write_rows(path: Path, workload: Workload, seed: int) -> None:
    """Problems as JSON lines, in the order in which every system takes them."""
    rng, highest = random.Random(seed), 10**workload.digits - 1
    pairs = [(rng.randint(0, highest), rng.randint(0, highest)) for _ in range(ROWS)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))


@dataclass(frozen=True)
class Step:
    """One policy update. ``time`` is its end (Unix seconds), ``cpu_s`` all CPU time of the system until then."""

    time: float
    reward: float
    tokens: float
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """Run of one system. ``start`` is when its first generation could begin; ``startup_s`` what came before."""

    system: str
    start: float
    startup_s: float
    steps: list[Step]
    facts: dict[str, Any]


def write_run(path: Path, run: Run) -> None:
    """Save as JSON."""
    path.write_text(json.dumps(asdict(run)))


def read_run(path: Path) -> Run:
    """Inverse of ``write_run``."""
    data = json.loads(path.read_text())
    return Run(**{**data, "steps": [Step(**step) for step in data["steps"]]})


def reached(rewards: Sequence[float], goal: float) -> int | None:
    """Steps until the mean reward of MEAN_OVER steps was at ``goal``, or None."""
    for end in range(MEAN_OVER, len(rewards) + 1):
        if sum(rewards[end - MEAN_OVER : end]) / MEAN_OVER >= goal:
            return end
    return None
