"""Soft actor-critic as a job of Penstock beside Stable-Baselines3: two MuJoCo tasks, equal steps, three seeds each.

    python benchmarks/soft_actor_critic.py --baseline PYTHON [--seeds 1 2 3] [--steps 20000] [--out STEM] [--report]

``PYTHON`` is an interpreter with ``stable-baselines3`` and ``gymnasium[mujoco]``. Both sides take one gradient step for
each environment step, with equal networks, batches and rates; the job takes them after each batch of episodes instead
of after each step. Both act at random for the first steps: the baseline uniformly, the job by its first policy. The
tasks are two that 20,000 steps are enough for; in HalfCheetah neither side begins to run in so few.
Target: on each task the job's mean return over the last two evaluations and all seeds is at least that of the baseline,
less one standard deviation of the baseline between seeds. ``--out STEM`` writes STEM.json and STEM.png, and each run to
STEM.runs.jsonl as it finishes: the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from report import Report
from resumable import Finished, digest, run_all
from service_run import run_job

from penstock.shared.config.jobs.kinds import parse_training

HERE = Path(__file__).resolve().parent
HORIZON = {"Reacher-v5": 50, "Pusher-v5": 100}
"""Tasks, each with the steps of all its episodes."""
SYSTEMS = ("job", "baseline")
STEPS_PER_UPDATE, WARMUP, EPISODES, EVALUATIONS, LAST = 1000, 1000, 10, 10, 2
LIMIT_S = 3600.0


@dataclass
class Run:
    """Mean return of deterministic episodes after so many environment steps, and the seconds until then."""

    system: str
    task: str
    seed: int
    steps: list[int]
    returns: list[float]
    seconds: list[float]

    @property
    def end(self) -> float:
        """Mean of the last evaluations."""
        return statistics.fmean(self.returns[-LAST:])


def job_of(task: str, seed: int, steps: int) -> dict[str, Any]:
    """Job that takes one gradient step for each step of the simulator."""
    updates, horizon = steps // STEPS_PER_UPDATE, HORIZON[task]
    episodes = STEPS_PER_UPDATE // horizon
    return {
        "kind": "embodied",
        "name": f"sac-{task.lower()}",
        "seed": seed,
        "environment": {
            "backend": "gymnasium", "task": task, "horizon": horizon, "num_envs": min(episodes, 4), "sessions": 1,
            "bytes_per_step": 512,
        },
        "policy": {"type": "squashed", "hidden_sizes": [256, 256], "normalise_observations": False},
        "algorithm": {"type": "sac", "warmup_transitions": WARMUP, "steps_per_update": STEPS_PER_UPDATE},
        "train": {"batch_size": episodes, "max_updates": updates, "max_lag": 0},
        "evaluation": {"episodes": EPISODES, "every": max(1, updates // EVALUATIONS)},
        "checkpoint": {"every": 1000},
    }  # fmt: skip


def one_run(baseline: Path, total: int, key: tuple[str, ...]) -> dict[str, Any]:
    """One task with one seed on one side."""
    system, task, seed = key[0], key[1], int(key[2])
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        if system == "job":
            finished = run_job(parse_training(job_of(task, seed, total)), Path(scratch))
            began = finished.series("reward/mean")[0][1]
            series = [point for point in finished.series("eval/return") if point[0] > 0]
            run = Run(
                system, task, seed, [step * STEPS_PER_UPDATE for step, _, _ in series],
                [value for _, _, value in series], [wall - began for _, wall, _ in series],
            )  # fmt: skip
        else:
            out = Path(scratch) / "result.json"
            subprocess.run(
                [
                    str(baseline), str(HERE / "sac" / "stable_baselines.py"), "--task", task, "--seed", str(seed),
                    "--steps", str(total), "--every", str(total // EVALUATIONS), "--warmup", str(WARMUP),
                    "--episodes", str(EPISODES), "--out", str(out),
                ],
                check=True, timeout=LIMIT_S,
            )  # fmt: skip
            run = Run(system, task, seed, **json.loads(out.read_text()))
    print(f"{task}, seed {seed}, {system}: {run.end:.1f} after {run.seconds[-1]:.0f} s", file=sys.stderr, flush=True)
    return asdict(run)


def fill(report: Report, runs: list[Run]) -> None:
    """A row for each task and system, a check for each task."""
    for task in HORIZON:
        ends = {system: [run.end for run in runs if (run.system, run.task) == (system, task)] for system in SYSTEMS}
        for system, values in ends.items():
            if values:
                seconds = [run.seconds[-1] for run in runs if (run.system, run.task) == (system, task)]
                report.row(
                    task, system, f"{statistics.fmean(values):.1f}", " ".join(f"{value:.1f}" for value in values),
                    f"{statistics.median(seconds):.0f}",
                )  # fmt: skip
        level = [statistics.fmean(values) if values else None for values in ends.values()]
        spread = statistics.stdev(ends["baseline"]) if len(ends["baseline"]) > 1 else 0.0
        holds = level[0] is not None and level[1] is not None and level[0] >= level[1] - spread
        report.check(f"{task}: the level of the baseline, less {spread:.1f} between its seeds", holds)
    report.results = {"runs": [asdict(run) for run in runs]}


def draw(runs: list[Run], path: Path) -> None:
    """A panel for each task: return over environment steps, a colour for each system, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(HORIZON), figsize=(10, 4))
    for axis, task in zip(axes, HORIZON, strict=True):
        for colour, system in enumerate(SYSTEMS):
            label: str | None = {"job": "Penstock", "baseline": "Stable-Baselines3"}[system]
            for run in (run for run in runs if (run.system, run.task) == (system, task)):
                axis.plot(run.steps, run.returns, color=f"C{colour}", alpha=0.8, linewidth=1, label=label)
                label = None
        axis.set_title(task, fontsize=9)
        axis.set_xlabel("environment steps")
        axis.set_ylabel(f"return, mean of {EPISODES} deterministic episodes")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Command line; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, required=True, help="an interpreter with stable-baselines3")
    parser.add_argument("--tasks", nargs="+", default=list(HORIZON), choices=list(HORIZON))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--parallel", type=int, default=2, help="runs at once; they share the cores")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", action="store_true", help="run nothing, report on the finished runs of --out")
    args = parser.parse_args()
    report = Report("Soft actor-critic", ["task", "system", "return", "by seed", "s"])
    digests = {task: digest(job_of(task, 0, args.steps)) for task in args.tasks}
    keys = [
        (system, task, str(seed), digests[task])
        for seed, task, system in product(args.seeds, args.tasks, SYSTEMS)
    ]  # fmt: skip
    finished = Finished(args.out.with_suffix(".runs.jsonl") if args.out else None)
    work = partial(one_run, args.baseline, args.steps)
    complete = not args.report and run_all(work, keys, finished, parallel=args.parallel)
    runs = [Run(**finished.runs[key]) for key in sorted(keys) if key in finished.runs]
    report.check(f"all {len(keys)} runs finished", len(runs) == len(keys))
    fill(report, runs)
    status = report.finish(args.out.with_suffix(".json") if args.out else None)
    if args.out is not None:
        draw(runs, args.out.with_suffix(".png"))
    if complete:
        finished.remove()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
