"""Run three batch jobs and an online job under a seeded schedule of faults, and check everything at the end.

    python -m tests.chaos [--seed 1] [--minutes 15] [--kinds kill,stop,...] [--without clock,...]
        [--no-deletions] [--keep DIR]

Prints the schedule, each fault with its time, and one summary per job. The exit status is 1 if a check fails. The same
seed and kinds give the same schedule again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.shared.config.base import with_overrides
from penstock.shared.errors import PenstockError
from penstock.shared.protocol.jobs import TERMINAL_PHASES
from tests.chaos.books import check_feedback, check_job, left_behind, open_files
from tests.chaos.deployment import Deployment
from tests.chaos.schedule import BATCH_JOBS, KINDS, schedule
from tests.chaos.traffic import Traffic

START_S, END_S, FREE_S = 60.0, 420.0, 60.0
FURTHER, FURTHER_ONLINE = 20, 3
"""Updates of a batch job and of the online job after the last fault."""
MORE_FILES = 64
"""Descriptors that a process may have in addition to those at the start: connections, logs, slots of four jobs."""

MODEL = {
    "config": {
        "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "max_position_embeddings": 64,
    },
    "tokenizer": "char",
    "characters": "0123456789+=",
}  # fmt: skip
SHARED: dict[str, Any] = {
    "model": MODEL,
    "sampling": {"max_new_tokens": 24},
    "optimizer": {"learning_rate": 1e-4},
    "limits": {"byte_budget": 16 << 20},
}
BATCH: dict[str, Any] = {
    **SHARED,
    "data": {"train": {"type": "addition", "digits": 1}, "prompt": {"max_tokens": 8}},
    # About half of what random weights write begins like this, so that every batch has something to learn.
    "reward": {"scorers": [{"type": "format", "pattern": "[0-4+].*"}], "processes": 1},
    "algorithm": {"group_size": 8},
    "train": {"batch_size": 64, "max_updates": 1_000_000, "draw_timeout_s": 20},
    "checkpoint": {"every": 10, "keep": 4},
}
CHANGES = (
    ["train.max_lag=1"],
    ["train.max_lag=0", "train.epochs=2", "train.minibatches=2", "train.reshuffle=true"],
    ["train.max_lag=3", "train.staleness=drop", "train.oversample=1.5"],
)
ONLINE: dict[str, Any] = {
    **SHARED,
    "kind": "online_rl",
    "name": "live",
    "sampling": {"max_new_tokens": 6},
    "train": {"batch_size": 8, "max_lag": 4},
    "algorithm": {"type": "reinforce_pp"},
    "online": {"metrics": {"liked": {"type": "boolean"}}, "max_wait_s": 2},
    "checkpoint": {"every": 10, "keep": 4},
}


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def run(deployment: Deployment, seed: int, minutes: float, kinds: list[str], *, deletions: bool) -> list[str]:
    """Run jobs, faults and checks in a deployment that is ready; return the failures."""
    client = deployment.client
    jobs = [client.submit(with_overrides({**BATCH, "name": f"batch-{i}"}, CHANGES[i])).id for i in range(BATCH_JOBS)]
    jobs.append(client.submit(ONLINE).id)
    for job in jobs:
        deployment.until(lambda job=job: client.get(job).status.phase == "running", f"{job} to run", START_S)
    traffic = Traffic(deployment.stack.url, "chaos-key", jobs[-1], seed, deletions=deletions)
    traffic.start()
    try:
        deployment.until(lambda: traffic.acked, "the first acknowledged feedback", START_S)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {dict(traffic.replies)} {traffic.refused}") from None
    files, wrong = open_files(deployment), list[str]()
    began = time.monotonic()
    try:
        for fault in schedule(seed, minutes, kinds):
            time.sleep(fault.after_s)
            at = time.monotonic() - began
            remark = deployment.commit(fault, jobs)
            say(f"{at:6.1f} s  {fault}{f'  ({remark})' if remark else ''}")
        say(f"{time.monotonic() - began:6.1f} s  the faults have ended")
        wrong += _end(deployment, jobs)
    finally:
        traffic.stop()
    summaries = [check_job(deployment, job, deletions=job == jobs[-1] and bool(traffic.deleted)) for job in jobs]
    for summary in summaries:
        say(str(summary))
        wrong += [f"{summary.name}: {flaw}" for flaw in summary.flaws]
    wrong += _reconcile(deployment, jobs[-1], traffic)
    wrong += _leaks(deployment, jobs, files)
    return wrong


def _end(deployment: Deployment, jobs: list[str]) -> list[str]:
    """Let every job make a few more updates and end; return a line for each job that does not."""
    client, wrong = deployment.client, list[str]()

    def amended(job: str) -> bool:
        status = client.get(job).status
        if status.phase in TERMINAL_PHASES:
            return True
        more = FURTHER_ONLINE if job == jobs[-1] else FURTHER
        client.amend(job, {"train": {"max_updates": (status.step or 0) + more}})
        return True

    deadline = time.monotonic() + END_S
    for job in jobs:
        deployment.until(lambda job=job: _tried(lambda: amended(job)), f"{job} to be amended", END_S)
    for job in jobs:
        try:
            deployment.until(
                lambda job=job: client.get(job).status.phase in TERMINAL_PHASES, f"the end of {job}",
                max(1.0, deadline - time.monotonic()),
            )  # fmt: skip
        except TimeoutError as error:
            wrong.append(f"{error}; it waits for: {client.why(job)}")
    return wrong


def _tried(act: Callable[[], bool]) -> bool:
    try:
        return act()
    except PenstockError as error:
        say(f"    again: {error}")
        return False


def _reconcile(deployment: Deployment, job: str, traffic: Traffic) -> list[str]:
    counts, wrong = check_feedback(deployment, job, traffic.acked)
    replies = ", ".join(f"{verb} {status}: {count}" for (verb, status), count in sorted(traffic.replies.items()))
    found = ", ".join(f"{place} {count}" for place, count in counts.items())
    say(f"feedback {len(traffic.acked)} acknowledged; found in: {found}; deleted users: {len(traffic.deleted)}")
    say(f"replies  {replies}")
    return wrong


def _leaks(deployment: Deployment, jobs: list[str], before: dict[str, int]) -> list[str]:
    """Check that ended jobs have no shared memory and that no process leaks descriptors; return the failures."""
    wrong = []

    def remaining() -> list[str]:
        return [path.name for path in deployment.shm.iterdir() if any(job in path.name for job in jobs)]

    try:
        deployment.until(lambda: not remaining(), "the weights of ended jobs to be removed", FREE_S)
    except TimeoutError as error:
        wrong.append(f"{error}: {remaining()}")
    files = open_files(deployment)
    say(f"files    {', '.join(f'{name} {before.get(name, 0)} -> {count}' for name, count in files.items())}")
    wrong += [
        f"{name} has {count} files open, {before[name]} at the beginning"
        for name, count in files.items()
        if name in before and count > before[name] + MORE_FILES
    ]
    return wrong


@contextmanager
def _directory() -> Iterator[Path]:
    """Create a temporary directory, in memory if there is room."""
    shm = Path("/dev/shm")
    root = shm if shm.is_dir() and shutil.disk_usage(shm).free > 4 << 30 else None
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-", dir=root, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as name:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", name], capture_output=True, check=False)
        if not mounted.returncode:
            subprocess.run(["umount", name], check=True)
        return not mounted.returncode


def _possible(kinds: list[str]) -> list[str]:
    """Return the kinds of faults that this machine can cause; print those that it cannot."""
    lacking = {}
    if "disk" in kinds and not _can_mount():
        lacking["disk"] = "no file system can be mounted here"
    for kind, why in lacking.items():
        if kind in kinds:
            say(f"SKIPPED  {kind}: {why}")
    return [kind for kind in kinds if kind not in lacking]


def main(words: list[str] | None = None) -> int:
    """Run the command line; return 1 if a check fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, default: all")
    parser.add_argument("--without", default="", help="kinds to leave out")
    parser.add_argument(
        "--deletions", action=argparse.BooleanOptionalAction, default=True, help="users are deleted meanwhile"
    )
    parser.add_argument("--keep", type=Path, help="copy logs and data there in the end")
    given = parser.parse_args(words)
    kinds = [kind for kind in given.kinds.split(",") if kind not in given.without.split(",")]
    kinds = _possible(kinds)
    say(f"seed {given.seed}, {given.minutes:g} minutes, kinds: {','.join(kinds)}")
    for fault in schedule(given.seed, given.minutes, kinds):
        say(f"    {fault}")
    with _directory() as directory:
        deployment = Deployment(
            directory, clocks="clock" in kinds, small_disk="disk" in kinds, keep=given.keep, say=say
        )  # fmt: skip
        with deployment:
            wrong = run(deployment, given.seed, given.minutes, kinds, deletions=given.deletions)
        wrong += left_behind(directory)
    say(f"restarts {len(deployment.restarts)}")
    for line in wrong:
        say(f"WRONG    {line}")
    again = f"python -m tests.chaos --seed {given.seed} --minutes {given.minutes:g} --kinds {','.join(kinds)}"
    say(f"{'FAILED' if wrong else 'PASSED'}   {again}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
