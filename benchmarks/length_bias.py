"""Effect of aggregations and overlong rules on the length of answers, and its cost.

    python benchmarks/length_bias.py [--task astray|rambling] [--arms token_mean ...] [--seeds 3] [--parallel 2]
        --out STEM [--report]

Each task is a job file of ``examples/ragged`` with arms that change its algorithm, and bounds that were written down
before the runs: ``length/astray.py`` (wrong answers grow longer) and ``length/rambling.py`` (right answers are lost).

Learner and sampler run in one process, without services. The arms of a seed start from the same version 0. ``--out
STEM`` writes STEM.json and STEM.png, and each run to STEM.runs.jsonl as it finishes; the same command goes on there.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from length.astray import ASTRAY
from length.drawing import draw
from length.loop import Loop
from length.rambling import RAMBLING
from length.task import Run
from report import Report
from resumable import Finished, digest, run_all

from penstock.shared.config.jobs.job import JobConfig

TASKS = {"astray": ASTRAY, "rambling": RAMBLING}
PROMPTS, EACH = 64, 8


def one_run(task_name: str, starts: Path, key: tuple[str, ...]) -> dict[str, Any]:
    """Train one arm of one seed."""
    torch.set_num_threads(1)
    task, arm, seed = TASKS[task_name], key[0], int(key[1])
    job = task.job_of(arm)
    config = JobConfig.parse({**job, "seed": seed})
    warm = digest({**job, "algorithm": None})
    began = time.time()
    loop = Loop(config, starts / f"{warm}-{seed}.pt", cut_off_fails=task.arms[arm].cut_off_fails)
    start = loop.held_out(PROMPTS, EACH)
    updates = [loop.step() for _ in range(config.train.max_updates or 0)]
    run = Run(arm, seed, updates, start, loop.held_out(PROMPTS, EACH), time.time() - began)
    print(
        f"{arm}, seed {seed}: right {run.start.right:.2f} -> {run.end.right:.2f}, "
        f"tokens after the mistake {_text(run.start.astray)} -> {_text(run.end.astray)}, "
        f"cut off {run.start.truncated:.2f} -> {run.end.truncated:.2f}, {run.seconds:.0f} s",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return asdict(run)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main() -> int:
    """Command line; the exit status is 1 if a prediction failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="astray")
    parser.add_argument("--arms", nargs="+", help="of the task; all of them if not given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; they share the cores")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", action="store_true", help="run nothing, report on the finished runs of --out")
    args = parser.parse_args()
    task = TASKS[args.task]
    arms = args.arms or list(task.arms)
    if unknown := set(arms) - set(task.arms):
        parser.error(f"task {args.task} has no arm {', '.join(sorted(unknown))}; its arms are {', '.join(task.arms)}")
    report = Report(task.title, task.columns)
    finished, starts = Finished(args.out.with_suffix(".runs.jsonl")), args.out.with_suffix(".starts")
    keys = [(arm, str(seed), digest(task.job_of(arm))) for arm in arms for seed in range(args.seeds)]
    work = partial(one_run, args.task, starts)
    complete = not args.report and run_all(work, keys, finished, parallel=args.parallel)
    runs = [Run.load(finished.runs[key]) for key in keys if key in finished.runs]
    report.check(f"all {len(keys)} runs finished", len(runs) == len(keys))
    task.fill(report, runs)
    report.results = {"held_out": [PROMPTS, EACH], "runs": [asdict(run) for run in runs]}
    status = report.finish(args.out.with_suffix(".json"))
    draw(runs, list(task.arms), task.panels, args.out.with_suffix(".png"))
    if complete:
        finished.remove()
        for start in starts.glob("*.pt"):
            start.unlink()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
