"""Many short jobs, one after another: no process grows, and no job leaves anything behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

JOBS, WARM = int(os.environ.get("PENSTOCK_SOAK_JOBS", "30")), 10
"""Allocators and caches have settled after the first ``WARM`` jobs; PENSTOCK_SOAK_JOBS=50 finds smaller leaks."""
SLACK = 0.05
SLACK_BYTES, SLACK_COUNT = 16 << 20, 2
"""Growth that is always allowed: less than the weights of one job, and a connection that comes and goes."""
MODEL = ("hidden_size=256", "intermediate_size=1024", "num_layers=6")
"""22 MiB of weights, so that it shows if a process does not release those of some jobs."""
SETTLE_S = 60.0
"""Longer than a process needs to release memory for the second time."""


class Use(NamedTuple):
    """Resources of one process and its children."""

    rss_bytes: int
    descriptors: int
    threads: int
    slots: int
    """Mapped weight slots, removed or not."""


def use_of(pid: int) -> Use:
    parent = psutil.Process(pid)
    uses = []
    for process in [parent, *parent.children(recursive=True)]:
        try:
            slots = Path(f"/proc/{process.pid}/maps").read_text().count("penstock-weights")
            uses.append(Use(process.memory_info().rss, process.num_fds(), process.num_threads(), slots))
        except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):  # a child that ended meanwhile
            continue
    return Use(*map(sum, zip(*uses, strict=True)))


def growth(first: dict[str, Use], last: dict[str, Use]) -> list[str]:
    """Return a line for each resource of which a process holds more than at first."""
    found = []
    for name, before in first.items():
        now, slack = last[name], (SLACK_BYTES, SLACK_COUNT, SLACK_COUNT, 0)
        for what, one, other, least in zip(Use._fields, before, now, slack, strict=True):
            if other > one + max(SLACK * one, least):
                found.append(f"{name}: {what} {one} -> {other}")
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_processes_hold_no_more_after_many_jobs_than_after_ten(deploy: Callable[[Path], Any], store_dir: Path) -> None:
    changes = [f"model.config.{change}" for change in MODEL] + ["train.max_updates=2", "train.batch_size=8"]
    with deploy(store_dir) as stack:

        def work(jobs: int) -> None:
            for _ in range(jobs):
                assert stack.finish(stack.submit(*changes), 120).status.phase == "succeeded"

        def uses() -> dict[str, Use]:
            return {name: use_of(pid) for name, pid in stack.stack.processes.items() if pid}

        def is_free() -> bool:
            return not any(use.slots for use in uses().values()) and not list(stack.shm.glob("*weights*"))

        work(WARM)
        stack.until(is_free, "processes to give back the weights of the first jobs", SETTLE_S, uses)
        first, pids = uses(), dict(stack.stack.processes)
        segments = sorted(path.name for path in stack.shm.iterdir())
        work(JOBS - WARM)
        stack.until(is_free, "processes to give back the weights of the last jobs", SETTLE_S, uses)
        stack.until(
            lambda: not growth(first, uses()), "processes to hold no more than after the first jobs", SETTLE_S,
            lambda: growth(first, uses()),
        )  # fmt: skip
        assert len(list(stack.shm.iterdir())) <= len(segments), segments
        assert pids == stack.stack.processes, "no process was started again"
