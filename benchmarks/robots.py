"""Two robot jobs of ``examples`` through the services: a cube pushed by PPO, and an arm whose actions are tokens.

    python benchmarks/robots.py [--jobs pushcube tokens] [--seeds 1 2 3] [--limit-s 3600] [--out robots.json]

Each job file runs with each seed, one job after the other, on one deployment of this machine. Seconds count from the
end of the first update: neither the start of services nor that of simulators is among them. Goals, for every seed:

- pushcube, ``maniskill-pushcube-ppo.yaml``: at the end, 0.8 of the held-out episodes succeed.
- tokens, ``metaworld-reach-grpo-tokens.yaml``: over five updates, 0.5 succeed within 120 s, and at the end.

A job that has not ended after ``--limit-s`` seconds is cancelled, and has missed its goal. ``--updates 1`` only shows
that everything starts. Needs ``penstock sims install maniskill`` for the first job.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import Report

from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.errors import DeadlineError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
READY_S, CANCEL_S = 120.0, 120.0
PATIENCE_S = 300.0
"""A job is accepted once its simulator was tried, which imports gigabytes."""
UPDATES = "success/rate"
"""Series with a value for each update, whose first one begins the seconds."""


@dataclass(frozen=True)
class Task:
    """A job file and its goal.

    Attributes:
        series: metric that the goal is about.
        window: number of values whose mean counts.
        goal: least mean of the last ``window`` values.
        within_s: seconds within which such a mean must be reached; None: within the run.
    """

    example: str
    series: str
    window: int
    goal: float
    within_s: float | None = None


TASKS = {
    "pushcube": Task("maniskill-pushcube-ppo.yaml", "eval/success", 1, 0.8),
    "tokens": Task("metaworld-reach-grpo-tokens.yaml", UPDATES, 5, 0.5, 120.0),
}


@dataclass(frozen=True)
class Run:
    """A job with one seed. ``seconds``, ``values``: when the series had which value; ``total_s``: of all updates."""

    job: str
    seed: int
    phase: str
    seconds: list[float]
    values: list[float]
    total_s: float

    def means(self, task: Task) -> list[tuple[float, float]]:
        """Seconds and mean of each full window."""
        ends = range(task.window, len(self.values) + 1)
        return [(self.seconds[end - 1], statistics.fmean(self.values[end - task.window : end])) for end in ends]

    def reached_s(self, task: Task) -> float | None:
        """Seconds until a mean first was the goal; None: never."""
        return next((second for second, mean in self.means(task) if mean >= task.goal), None)

    def final(self, task: Task) -> float | None:
        """Mean of the last window; None: there was no full one."""
        means = self.means(task)
        return means[-1][1] if means else None

    def meets(self, task: Task) -> bool:
        """True if the job succeeded and had its goal in time and at the end."""
        final, reached_s = self.final(task), self.reached_s(task)
        if self.phase != "succeeded" or final is None or reached_s is None:
            return False
        return final >= task.goal and (task.within_s is None or reached_s <= task.within_s)


async def one_run(client: AsyncClient, name: str, seed: int, args: argparse.Namespace) -> Run:
    """Run a job to its end, or to the time limit; return what it learnt."""
    task, changes = TASKS[name], [f"seed={seed}"]
    if args.updates:
        changes.append(f"train.max_updates={args.updates}")
    job = (await client.submit(with_overrides(load_yaml(EXAMPLES / task.example), changes))).id
    try:
        record = await client.wait(job, timeout_s=args.limit_s)
    except DeadlineError:
        await client.cancel(job, checkpoint=False)
        record = await client.wait(job, timeout_s=CANCEL_S)
    metrics = await client.metrics(job, max_points=10_000)
    updates = points(metrics, UPDATES)
    start = updates[0][0] if updates else 0.0
    found = points(metrics, task.series)
    return Run(
        name, seed, record.status.phase, [max(0.0, wall - start) for wall, _ in found], [value for _, value in found],
        updates[-1][0] - start if updates else 0.0,
    )  # fmt: skip


def points(metrics: dict[str, Any], series: str) -> list[tuple[float, float]]:
    """Wall seconds and value, where the series has one."""
    columns = metrics["wall"], metrics["series"].get(series, [])
    return [(wall, float(value)) for wall, value in zip(*columns, strict=False) if value is not None]


async def run_all(args: argparse.Namespace, report: Report) -> None:
    """Run every job with every seed; write the results after each."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        options = StackOptions(data_dir=Path(folder), environment={"PENSTOCK_API_KEYS": "bench"})
        async with Stack(options, lambda text: None) as stack:
            await stack.ready(deadline_s=READY_S)
            async with AsyncClient(stack.url, api_key=stack.api_key, patience_s=PATIENCE_S) as client:
                for name in args.jobs:
                    for seed in args.seeds:
                        runs.append(await one_run(client, name, seed, args))
                        add(report, runs[-1])
                        report.results = {"tasks": {one: asdict(TASKS[one]) for one in args.jobs}}
                        report.results["runs"] = [asdict(run) for run in runs]
                        report.write(args.out)
    for name in args.jobs:
        check(report, name, [run for run in runs if run.job == name])


def add(report: Report, run: Run) -> None:
    """Add the row of a run, and say it on stderr."""
    task = TASKS[run.job]
    reached_s, final = run.reached_s(task), run.final(task)
    cells = (
        run.job, str(run.seed), run.phase, "-" if final is None else f"{final:.2f}",
        "-" if reached_s is None else f"{reached_s:.0f}", f"{run.total_s:.0f}",
    )  # fmt: skip
    report.row(*cells)
    print(", ".join(cells), file=sys.stderr, flush=True)


def check(report: Report, name: str, runs: Sequence[Run]) -> None:
    """Check the goal of a job: every seed must meet it."""
    task = TASKS[name]
    within = "" if task.within_s is None else f", reached within {task.within_s:g} s"
    report.check(f"{name}: success of at least {task.goal} with every seed{within}", all(r.meets(task) for r in runs))


def main() -> int:
    """Command line; the exit status is 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--limit-s", type=float, default=3600.0, help="end each job after so many seconds")
    parser.add_argument("--updates", type=int, help="instead of those of the job files")
    parser.add_argument("--out", type=Path, help="write the results as JSON, after each run")
    args = parser.parse_args()
    columns = ["job", "seed", "ended", "success at the end", "s until the goal", "s of all updates"]
    report = Report("Robots: a cube that is pushed, and actions as tokens", columns)
    asyncio.run(run_all(args, report))
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
