"""Robot jobs of ``examples`` through the services: each runs with several seeds, and each has a goal.

    python benchmarks/robots.py [--jobs pushcube,tokens] [--seeds 1,2,3] [--limit-s 3600] [--out robots.json]

The jobs run one after the other on one deployment of this machine. Goals, for every seed:

- pushcube, ``maniskill-pushcube-ppo.yaml``: at the end, 0.8 of the held-out episodes succeed.
- halfcheetah, ``gym-halfcheetah-sac.yaml``: at the end, held-out episodes have a return of 3000.
- libero, ``libero-object-ppo.yaml``: the return of held-out episodes doubles. Its reward is the way to the object; the
  task itself is not solved.
- worldmodel, ``metaworld-reach-world-model-ppo.yaml``: the policy trains in a model of the simulator, and at the end
  0.8 of the held-out episodes succeed in the simulator. Each seed records its own episodes and trains its own model.
- tokens, ``metaworld-reach-grpo-tokens.yaml``: over five updates, 0.5 succeed within 120 s, and at the end.

Seconds count from the end of the first update: neither the start of services nor that of simulators is among them. A
job that has not ended after ``--limit-s`` seconds is cancelled, and has missed its goal. ``--updates 1`` only shows
that everything starts. ``--out`` keeps the runs of other jobs and seeds that the file already has. Needs ``penstock
sims install`` for each simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from report import Report

from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.base import load_yaml, with_overrides
from penstock.shared.errors import DeadlineError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
READY_S, CANCEL_S = 120.0, 120.0
PATIENCE_S = 300.0
"""A job is accepted once its simulator was tried, which imports gigabytes."""
RECORDED = 600
"""Episodes of a world model, as the example's comment says."""
UPDATES = "reward/mean"
"""Series with a value for each update, whose first one begins the seconds."""


@dataclass(frozen=True)
class Task:
    """A job file and its goal.

    Attributes:
        series: metric that the goal is about.
        window: number of values whose mean counts.
        goal: least mean of the last ``window`` values.
        times_start: True if ``goal`` is a multiple of the first mean.
        within_s: seconds within which such a mean must be reached; None: within the run.
        seeds: default of ``--seeds``.
        world_model: True if the job acts in a model that must be trained first.
    """

    example: str
    series: str
    window: int
    goal: float
    times_start: bool = False
    within_s: float | None = None
    seeds: tuple[int, ...] = (1, 2, 3)
    world_model: bool = False


TASKS = {
    "pushcube": Task("maniskill-pushcube-ppo.yaml", "eval/success", 1, 0.8),
    "halfcheetah": Task("gym-halfcheetah-sac.yaml", "eval/return", 1, 3000.0, seeds=(1,)),
    "libero": Task("libero-object-ppo.yaml", "eval/return", 1, 2.0, times_start=True, seeds=(1,)),
    "worldmodel": Task("metaworld-reach-world-model-ppo.yaml", "eval/success", 1, 0.8, world_model=True),
    "tokens": Task("metaworld-reach-grpo-tokens.yaml", "success/rate", 5, 0.5, within_s=120.0),
}


@dataclass(frozen=True)
class Run:
    """A job with one seed.

    Attributes:
        start, end: first and last mean of the task's window; None: there was no full one.
        reached_s: seconds until a mean first was the goal; None: never.
        seconds: of all updates.
        met: True if the job succeeded and had its goal in time and at the end.
        updates, values: after which update the series had which value.
        load: average number of processes that wanted the machine in the last minute of the run.
    """

    job: str
    seed: int
    phase: str
    start: float | None
    end: float | None
    reached_s: float | None
    seconds: float
    met: bool
    updates: list[int]
    values: list[float]
    load: float


def judged(name: str, seed: int, phase: str, metrics: dict[str, Any]) -> Run:
    """Return what the metrics of an ended job say about its goal."""
    task, clock, found = TASKS[name], points(metrics, UPDATES), points(metrics, TASKS[name].series)
    began = clock[0][1] if clock else 0.0
    ends = range(task.window, len(found) + 1)
    means = [(found[i - 1][1] - began, statistics.fmean(v for *_, v in found[i - task.window : i])) for i in ends]
    start, end = (means[0][1], means[-1][1]) if means else (None, None)
    goal = task.goal * (start or 0.0) if task.times_start else task.goal
    reached = next((max(0.0, second) for second, mean in means if mean >= goal), None)
    in_time = reached is not None and (task.within_s is None or reached <= task.within_s)
    return Run(
        name, seed, phase, start, end, reached, clock[-1][1] - began if clock else 0.0,
        met=phase == "succeeded" and in_time and end is not None and end >= goal,
        updates=[update for update, *_ in found], values=[value for *_, value in found], load=os.getloadavg()[0],
    )  # fmt: skip


def points(metrics: dict[str, Any], series: str) -> list[tuple[int, float, float]]:
    """Return update, wall seconds and value, where the series has one."""
    columns = metrics["steps"], metrics["wall"], metrics["series"].get(series, [])
    return [(step, wall, float(value)) for step, wall, value in zip(*columns, strict=False) if value is not None]


def train_world_model(job: dict[str, Any], seed: int, folder: Path) -> Path:
    """Record random episodes in the simulator, train a model of them, and return its folder.

    Raises:
        CalledProcessError: one of the two commands failed.
    """
    penstock = [str(Path(sys.executable).parent / "penstock")]
    file, episodes, model = (folder / f"{name}-{seed}" for name in ("job.yaml", "reach.demonstrations", "reach-model"))
    file.write_text(yaml.safe_dump(with_overrides(job, [f"environment.first_reset_id={(seed - 1) * 1000}"])))
    recording = ["--random", "--hold", "16", "--episodes", str(RECORDED), "--to", str(episodes)]
    subprocess.run([*penstock, "record", str(file), *recording], check=True)
    fitting = ["--hidden", "128", "--hidden", "128", "--seed", str(seed), "--out", str(model)]
    subprocess.run([*penstock, "sims", "world-model", "train", str(episodes), *fitting], check=True)
    return model


async def one_run(client: AsyncClient, name: str, seed: int, args: argparse.Namespace, folder: Path) -> Run:
    """Run a job to its end, or to the time limit; return what it learnt."""
    job, changes = load_yaml(EXAMPLES / TASKS[name].example), [f"seed={seed}"]
    if TASKS[name].world_model:
        model = await asyncio.to_thread(train_world_model, job, seed, folder)
        changes += [f"environment.options.model={model}", f"environment.first_reset_id={(seed - 1) * 1000}"]
    if args.updates:
        changes.append(f"train.max_updates={args.updates}")
    number = (await client.submit(with_overrides(job, changes))).id
    try:
        record = await client.wait(number, timeout_s=args.limit_s)
    except DeadlineError:
        await client.cancel(number, checkpoint=False)
        record = await client.wait(number, timeout_s=CANCEL_S)
    return judged(name, seed, record.status.phase, await client.metrics(number, max_points=10_000))


async def run_all(args: argparse.Namespace, report: Report) -> None:
    """Run every job with every seed; write the results after each."""
    kept = {(run.job, run.seed): run for run in earlier(args.out)}
    with tempfile.TemporaryDirectory() as folder:
        options = StackOptions(data_dir=Path(folder) / "data", environment={"PENSTOCK_API_KEYS": "bench"})
        async with Stack(options, lambda text: None) as stack:
            await stack.ready(deadline_s=READY_S)
            async with AsyncClient(stack.url, api_key=stack.api_key, patience_s=PATIENCE_S) as client:
                for name in args.jobs:
                    for seed in args.seeds or TASKS[name].seeds:
                        run = kept[name, seed] = await one_run(client, name, seed, args, Path(folder))
                        print(", ".join(cells(run)), file=sys.stderr, flush=True)
                        fill(report, kept.values())
                        report.write(args.out)


def earlier(out: Path | None) -> list[Run]:
    """Return the runs that the file of results already has."""
    if out is None or not out.exists():
        return []
    return [Run(**run) for run in json.loads(out.read_text())["results"]["runs"]]


def fill(report: Report, found: Iterable[Run]) -> None:
    """Make the rows, checks and results of a report."""
    runs = sorted(found, key=lambda run: (list(TASKS).index(run.job), run.seed))
    report.rows, report.checks = [cells(run) for run in runs], {}
    for name in dict.fromkeys(run.job for run in runs):
        report.check(goal_of(name), all(run.met for run in runs if run.job == name))
    names = dict.fromkeys(run.job for run in runs)
    report.results = {"tasks": {name: asdict(TASKS[name]) for name in names}, "runs": [asdict(run) for run in runs]}


def cells(run: Run) -> list[str]:
    """Return the row of a run."""
    start, end = ("-" if value is None else f"{value:.2f}" for value in (run.start, run.end))
    reached = "-" if run.reached_s is None else f"{run.reached_s:.0f}"
    return [run.job, str(run.seed), run.phase, TASKS[run.job].series, start, end, reached, f"{run.seconds:.0f}"]


def goal_of(name: str) -> str:
    """Return the goal of a job in words."""
    task = TASKS[name]
    within = "" if task.within_s is None else f", reached within {task.within_s:g} s"
    return f"{name}: {task.series} of at least {task.goal:g}{' times the first' * task.times_start}, each seed{within}"


def job_names(text: str) -> list[str]:
    """Parse the value of ``--jobs``. Raises ArgumentTypeError if a job is unknown."""
    names = text.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(TASKS)}")
    return names


def numbers(text: str) -> list[int]:
    """Parse integers between commas."""
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Command line; the exit status is 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=job_names, default=list(TASKS), help=f"of {','.join(TASKS)}")
    parser.add_argument("--seeds", type=numbers, help="default: 1,2,3; of halfcheetah and libero: 1")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="end each job after so many seconds")
    parser.add_argument("--updates", type=int, help="instead of those of the job files")
    parser.add_argument("--out", type=Path, help="write the results as JSON, after each run")
    args = parser.parse_args()
    columns = ["job", "seed", "ended", "metric", "start", "end", "s until the goal", "s of all updates"]
    report = Report("Robots: job files of examples, each with its goal", columns)
    asyncio.run(run_all(args, report))
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
