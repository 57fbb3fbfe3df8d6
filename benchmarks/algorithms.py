"""Learning curves of every algorithm that ships as a job file in ``examples/algorithms``, three seeds each.

    python benchmarks/algorithms.py [--algorithms grpo ...] [--seeds 3] [--parallel 2] [--out STEM] [--report]

Each run goes through the services and stops at the goal of its job file (``early_stop``) or at its limit. The
target: every seed of every algorithm reaches a mean sampled reward of 0.9 over ten updates within ``--budget`` samples.
``--out STEM`` writes STEM.json and STEM.png, and each run to STEM.runs.jsonl as it finishes: the same command goes on
after an interruption. A run counts as finished if its job file still says the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from report import Report
from resumable import Finished, digest, run_all
from service_run import run_job

from penstock.shared.config.jobs.job import JobConfig

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "algorithms"
GOAL, WINDOW = 0.9, 10


@dataclass
class Curve:
    """Mean sampled reward of each update of one run."""

    algorithm: str
    seed: int
    batch_size: int
    rewards: list[float]
    seconds: float
    load: float | None = None
    """Load average of the machine at the end; None: not written down."""

    def smoothed(self) -> list[float]:
        """Mean over the last ``WINDOW`` updates, for each update from the first full window."""
        return [statistics.fmean(self.rewards[i - WINDOW : i]) for i in range(WINDOW, len(self.rewards) + 1)]

    def samples_to_goal(self) -> int | None:
        """Trajectories trained on until the mean over ``WINDOW`` updates reached the goal."""
        updates = next((i for i, value in enumerate(self.smoothed(), WINDOW) if value >= GOAL), None)
        return None if updates is None else updates * self.batch_size


def job_of(folder: Path, algorithm: str) -> dict[str, Any]:
    """The job file of one algorithm."""
    spec: dict[str, Any] = yaml.safe_load((folder / f"{algorithm}.yaml").read_text())
    return spec


def one_run(folder: Path, key: tuple[str, ...]) -> dict[str, Any]:
    """One algorithm with one seed, through the services."""
    algorithm, seed = key[0], int(key[1])
    config = JobConfig.parse({**job_of(folder, algorithm), "seed": seed})
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        finished = run_job(config, Path(scratch))
    series = finished.series("reward/mean")
    curve = Curve(
        algorithm, seed, config.train.batch_size, [value for _, _, value in series], series[-1][1] - series[0][1],
        round(os.getloadavg()[0], 1),
    )  # fmt: skip
    print(
        f"{algorithm}, seed {seed}: {curve.rewards[0]:.2f} -> {curve.smoothed()[-1]:.2f} in {len(series)} updates, "
        f"{curve.samples_to_goal() or 'no'} samples to {GOAL}, {curve.seconds:.0f} s at a load of {curve.load}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return asdict(curve)


def fill(report: Report, curves: list[Curve], *, budget: int) -> None:
    """A row and a check for each algorithm."""
    by_algorithm: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        by_algorithm[curve.algorithm].append(curve)
    for algorithm, runs in by_algorithm.items():
        needed = [run.samples_to_goal() for run in runs]
        starts, ends = [run.rewards[0] for run in runs], [run.smoothed()[-1] for run in runs]
        report.row(
            algorithm, f"{statistics.fmean(starts):.2f}", f"{min(ends):.2f}", f"{statistics.fmean(ends):.2f}",
            " ".join(str(samples or "-") for samples in needed), f"{statistics.fmean(run.seconds for run in runs):.0f}",
        )  # fmt: skip
        reached = all(samples is not None and samples <= budget for samples in needed)
        report.check(f"{algorithm}: {GOAL} within {budget} samples, {len(runs)} seeds", reached)
    report.results = {"goal": GOAL, "window": WINDOW, "budget": budget, "curves": [asdict(curve) for curve in curves]}


def draw(curves: list[Curve], path: Path) -> None:
    """One panel: smoothed reward over samples, a colour per algorithm, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(curve.algorithm for curve in curves))}
    for curve in curves:
        values = curve.smoothed()
        samples = [(WINDOW + i) * curve.batch_size for i in range(len(values))]
        label = curve.algorithm if curve is next(c for c in curves if c.algorithm == curve.algorithm) else None
        axis.plot(samples, values, color=colours[curve.algorithm], alpha=0.8, linewidth=1, label=label)
    axis.axhline(GOAL, color="black", linewidth=0.6, linestyle=":")
    axis.set_xlabel("samples trained on")
    axis.set_ylabel(f"sampled reward, mean of {WINDOW} updates")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Command line; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=EXAMPLES, help="directory of job files, <algorithm>.yaml")
    parser.add_argument("--algorithms", nargs="+", help="default: every job file in the folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; they share the cores")
    parser.add_argument("--budget", type=int, default=150_000, help="samples within which the goal must be reached")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", action="store_true", help="run nothing, report on the finished runs of --out")
    args = parser.parse_args()
    names = args.algorithms or sorted(path.stem for path in args.folder.glob("*.yaml"))
    report = Report(
        f"Sampled reward on the task of {args.folder.name}",
        ["algorithm", "start", "worst end", "mean end", f"samples to {GOAL}", "s"],
    )
    digests = {name: digest(job_of(args.folder, name)) for name in names}
    keys = [(name, str(seed), digests[name]) for seed, name in product(range(args.seeds), names)]
    finished = Finished(args.out.with_suffix(".runs.jsonl") if args.out else None)
    complete = not args.report and run_all(partial(one_run, args.folder), keys, finished, parallel=args.parallel)
    curves = [Curve(**finished.runs[key]) for key in sorted(keys) if key in finished.runs]
    report.check(f"all {len(keys)} runs finished", len(curves) == len(keys))
    fill(report, curves, budget=args.budget)
    status = report.finish(args.out.with_suffix(".json") if args.out else None)
    if args.out is not None:
        draw(curves, args.out.with_suffix(".png"))
    if complete:
        finished.remove()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
