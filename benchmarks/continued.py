"""Does a policy lose what it has learnt when its training goes on?

    python benchmarks/continued.py [--updates 200] [--more 40] [--out docs/results/continued.json]

The job is ``examples/addition.yaml`` at a constant learning rate and with a fixed number of updates. Its training goes
on in three ways, at the same rate and for the same number of updates: a new job from its last checkpoint, whose
optimizer begins anew (``none``: without a warm-up of the rate; ``warm-up``: with one of WINDOW updates), and the job
itself, with the state of its optimizer (``extend``). All of it runs through the services of one deployment.

Reported of each way: the mean sampled reward of its first and of its last WINDOW updates, and of its worst update,
beside the last WINDOW updates of the job before. The targets: with a warm-up, and extended, the first WINDOW updates
lose at most LOSS; without a warm-up, the worst update is worse than with one. Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from report import Report

from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "addition.yaml"
NAME = "continued"
WINDOW = 10
LOSS = 0.05
READY_S, JOB_S = 400.0, 3600.0
ARMS = {"none": "new optimizer, no warm-up", "warm-up": f"new optimizer, warm-up of {WINDOW}", "extend": "extended"}


def first_job(updates: int) -> dict[str, Any]:
    """The job file whose training goes on."""
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    del spec["early_stop"]  # a job that ended early is not extended
    spec["optimizer"] |= {"schedule": "constant"}
    spec["train"] |= {"max_updates": updates}
    return {**spec, "name": NAME}


def new_job(arm: str, *, more: int) -> dict[str, Any]:
    """The job file of a new job that begins with the last checkpoint of the first one."""
    spec = copy.deepcopy(first_job(more))
    del spec["warm_start"]
    spec["optimizer"] |= {"warmup_updates": WINDOW if arm == "warm-up" else 0}
    return {**spec, "name": f"{NAME}-{arm}", "model": {"path": f"job:{NAME}@final"}}


async def rewards_of(client: AsyncClient, job: str) -> list[float]:
    """Mean sampled reward of each update of a job, once it has ended.

    Raises:
        SystemExit: the job did not succeed, or its books do not hold.
    """
    record = await client.wait(job, timeout_s=JOB_S)
    audit = await client.audit(job)
    if record.status.phase != "succeeded" or not audit["ok"]:
        raise SystemExit(f"{record.name} {record.status.phase}: {record.status.message}; books hold: {audit['ok']}")
    metrics = await client.metrics(job, names="reward/mean", max_points=10_000)
    return [value for value in metrics["series"]["reward/mean"] if value is not None]


async def measure(scratch: Path, *, updates: int, more: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Rewards of each update, and seconds, of the first job (``before``) and of each way to go on."""
    rewards, seconds = dict[str, list[float]](), dict[str, float]()
    options = StackOptions(data_dir=scratch, environment={"PENSTOCK_API_KEYS": ""})
    async with Stack(options) as stack:
        await stack.ready(deadline_s=READY_S)
        async with AsyncClient(stack.url, api_key=stack.api_key) as client:
            first = ""
            for name in ("before", *ARMS):  # extend comes last: after it, the first job has another final checkpoint
                began = time.monotonic()
                if name == "extend":
                    job = first
                    await client.extend(job, updates + more)
                else:
                    spec = first_job(updates) if name == "before" else new_job(name, more=more)
                    job = (await client.submit(spec)).id
                first = first or job
                found = await rewards_of(client, job)
                rewards[name] = found[updates:] if name == "extend" else found
                seconds[name] = round(time.monotonic() - began, 1)
                print(f"{name}: {len(rewards[name])} updates in {seconds[name]} s", file=sys.stderr, flush=True)
    return rewards, seconds


def fill(report: Report, rewards: dict[str, list[float]], seconds: dict[str, float]) -> None:
    """A row for the first job and for each way to go on, and the checks."""
    before = statistics.fmean(rewards["before"][-WINDOW:])
    report.row("before", "", f"{before:.3f}", "", f"{seconds['before']:.0f}")
    first = {arm: statistics.fmean(rewards[arm][:WINDOW]) for arm in ARMS}
    worst = {arm: min(rewards[arm]) for arm in ARMS}
    for arm, what in ARMS.items():
        last = statistics.fmean(rewards[arm][-WINDOW:])
        report.row(what, f"{first[arm]:.3f}", f"{last:.3f}", f"{worst[arm]:.3f}", f"{seconds[arm]:.0f}")
    for arm in ("warm-up", "extend"):
        lost = before - first[arm]
        report.check(f"{ARMS[arm]}: the first {WINDOW} updates lose {lost:.3f}, at most {LOSS:g}", lost <= LOSS)
    text = f"the worst update: {worst['none']:.3f} without a warm-up, {worst['warm-up']:.3f} with one"
    report.check(text, worst["none"] < worst["warm-up"])
    report.results = {"window": WINDOW, "rewards": rewards, "seconds": seconds}


def main() -> int:
    """Command line; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200, help=f"updates of the first job, at least {WINDOW}")
    parser.add_argument("--more", type=int, default=40, help=f"updates of each way to go on, at least {WINDOW}")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    args = parser.parse_args()
    if min(args.updates, args.more) < WINDOW:
        parser.error(f"--updates and --more: at least {WINDOW}")
    report = Report(
        f"Sampled reward when the training of {args.updates} updates goes on for {args.more}",
        ["", f"first {WINDOW}", f"last {WINDOW}", "worst update", "s"],
    )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        rewards, seconds = asyncio.run(measure(Path(scratch), updates=args.updates, more=args.more))
    fill(report, rewards, seconds)
    return report.finish(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
