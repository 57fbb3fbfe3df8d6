"""Many short jobs, one after another: no process grows, and nothing of them is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

JOBS, WARM = 50, 10
"""Allocators and caches have settled after the first ``WARM`` jobs."""
SLACK = 0.05
NAMES = ("coordinator-0", "trainer-0", "rollout-0", "reward-0", "env-0")


class Use(NamedTuple):
    """Of one process."""

    rss_bytes: int
    descriptors: int
    slots: int
    """Mapped weight slots."""


def use_of(pid: int) -> Use:
    process = Path("/proc") / str(pid)
    pages = int((process / "statm").read_text().split()[1])
    slots = sum("penstock-weights" in line for line in (process / "maps").read_text().splitlines())
    return Use(4096 * pages, len(list((process / "fd").iterdir())), slots)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fifty_jobs_leave_every_process_as_it_was(stack: Any) -> None:
    pids = {name: stack.pid(name) for name in NAMES if name in stack.stack.processes}
    seen: list[dict[str, Use]] = []
    for number in range(JOBS):
        job = stack.submit("train.max_updates=1")
        assert stack.finish(job, 120).status.phase == "succeeded"
        if number >= WARM - 1:
            stack.until(
                lambda: all(use_of(pid).slots == 0 for pid in pids.values()), "processes to give back the weights"
            )
            seen.append({name: use_of(pid) for name, pid in pids.items()})
    assert not list(stack.shm.glob("penstock-weights-*"))
    for name in pids:
        first, last = seen[0][name], seen[-1][name]
        assert last.rss_bytes <= first.rss_bytes * (1 + SLACK), f"{name}: {first} -> {last}"
        assert last.descriptors <= first.descriptors * (1 + SLACK) + 1, f"{name}: {first} -> {last}"
