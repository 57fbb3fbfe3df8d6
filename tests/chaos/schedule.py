"""The schedule of faults: a pure function of a seed, so that a failure can be repeated."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["BATCH_JOBS", "KINDS", "SERVERS", "SKEWED", "WORKERS", "Fault", "schedule"]

BATCH_JOBS = 3
WORKERS = ("coordinator-0", "rollout-0", "rollout-1", "reward-0", "trainer-0")
SERVERS = ("nats", "valkey")
SKEWED = ("coordinator-0", "rollout-0", "rollout-1", "trainer-0")
"""Workers whose clocks faults change; nats-server is a static program and keeps the right one."""
GAP_S = (2.0, 7.0)
"""Range of the pause between the end of a fault and the next fault."""
KINDS = {
    "kill": 5,  # SIGKILL
    "stop": 4,  # SIGSTOP, later SIGCONT
    "pair": 3,  # two processes killed at once
    "clock": 3,  # a process whose wall clock is wrong for a while
    "disk": 1,  # no room on the disk of streams and checkpoints
    "link": 3,  # nothing passes between a process and NATS
    "slots": 2,  # weight slots of a job removed while a rollout worker is down
    "checkpoint": 1,  # a byte of a job's newest checkpoint changed, and its trainer killed
}
"""Kinds of faults, each with its weight in the random choice."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``targets`` are processes; ``job`` is the index of a job, of which the online job is the last.

    ``after_s`` is the pause before the fault, ``seconds`` its duration, ``skew_s`` the shift of a clock.
    """

    number: int
    kind: str
    after_s: float
    targets: tuple[str, ...] = ()
    seconds: float = 0.0
    skew_s: int = 0
    job: int = -1

    def __str__(self) -> str:
        parts = [f"{self.number:3d} +{self.after_s:4.1f} s  {self.kind:<10}", " ".join(self.targets)]
        parts += [f"for {self.seconds:.1f} s"] if self.seconds else []
        parts += [f"by {self.skew_s:+d} s"] if self.skew_s else []
        parts += [f"job {self.job}"] if self.job >= 0 else []
        return " ".join(filter(None, parts))


def schedule(seed: int, minutes: float, kinds: Collection[str]) -> list[Fault]:
    """Return faults for so many ``minutes``, each of one of the ``kinds``; every kind comes once before one repeats.

    Raises:
        ValueError: a kind does not exist, or ``kinds`` is empty.
    """
    unknown = set(kinds) - set(KINDS)
    if unknown or not kinds:
        raise ValueError(f"kinds of faults: {', '.join(sorted(unknown)) or 'none'}; there are {', '.join(KINDS)}")
    chosen = [kind for kind in KINDS if kind in kinds]
    rng = random.Random(f"chaos/{seed}")
    first = rng.sample(chosen, len(chosen))
    faults: list[Fault] = []
    end_s = 0.0
    while end_s < minutes * 60:
        number = len(faults)
        kind = first[number] if number < len(first) else rng.choices(chosen, [KINDS[kind] for kind in chosen])[0]
        fault = _draw(rng, number, kind)
        end_s += fault.after_s + fault.seconds
        faults.append(fault)
    return faults


def _draw(rng: random.Random, number: int, kind: str) -> Fault:
    after_s, job = round(rng.uniform(*GAP_S), 1), rng.randrange(BATCH_JOBS + 1)
    everybody = (*WORKERS, *SERVERS)
    several = {"pair": tuple(rng.sample(everybody, 2)), "disk": ()}
    among = {
        "kill": everybody,
        "stop": everybody,
        "clock": SKEWED,
        "link": WORKERS,
        "slots": ("rollout-0", "rollout-1"),
    }
    lasts = {"stop": (1, 8), "clock": (5, 12), "disk": (2, 6), "link": (1, 10)}
    return Fault(
        number, kind, after_s,
        several[kind] if kind in several else (rng.choice(among.get(kind, ("trainer-0",))),),
        seconds=round(rng.uniform(*lasts[kind]), 1) if kind in lasts else 0.0,
        skew_s=rng.choice((-1, 1)) * rng.choice((2, 30, 130, 3600)) if kind == "clock" else 0,
        job=job if kind in ("slots", "checkpoint") else -1,
    )  # fmt: skip
