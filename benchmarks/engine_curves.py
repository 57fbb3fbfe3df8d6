"""Learning curves of the addition job on the embedded engine and on vLLM, three seeds each.

    python benchmarks/engine_curves.py [--engines embedded vllm] [--seeds 3] [--updates 100] [--out STEM] [--report]

The job is ``examples/addition.yaml`` with a fixed number of updates; only ``rollout.engine`` differs. The target: the
engines differ by no more than the seeds do, over the whole curve and at its end, and the log-probs of both are those of
the trainer. ``--out STEM`` writes STEM.json and STEM.png, and each run to STEM.runs.jsonl as it finishes: the same
command goes on after an interruption. vLLM is the one that ``penstock engines install vllm`` made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from report import Report
from resumable import Finished, digest, run_all
from service_run import run_job

from penstock.local.engines import engine_python
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.rollout import ENGINE_PACKAGES
from penstock.shared.config.service import load_settings

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "addition.yaml"
OPTIONS: dict[str, dict[str, Any]] = {
    "embedded": {"engine": "embedded"},
    "vllm": {"engine": "vllm", "kv_cache_gib": 0.25},
    "vllm_server": {"engine": "vllm_server", "kv_cache_gib": 0.25},
}
WINDOW = 10
MISMATCH = 1e-4
"""Largest mean difference of log-probs between engine and trainer, in float32."""


@dataclass
class Curve:
    """Mean sampled reward of each update of one run, and the distance of the log-probs from the trainer's."""

    engine: str
    seed: int
    batch_size: int
    rewards: list[float]
    mismatch: float
    seconds: float
    load: float
    """Load average of the machine at the end."""

    def smoothed(self) -> list[float]:
        """Mean over the last ``WINDOW`` updates, for each update from the first full window."""
        return [statistics.fmean(self.rewards[i - WINDOW : i]) for i in range(WINDOW, len(self.rewards) + 1)]


def job_of(engine: str, *, updates: int) -> dict[str, Any]:
    """The job file of one engine."""
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    del spec["early_stop"]
    spec["train"] |= {"max_updates": updates, "draw_timeout_s": 600}
    return {**spec, "rollout": OPTIONS[engine]}


def one_run(updates: int, key: tuple[str, ...]) -> dict[str, Any]:
    """One engine with one seed, through the services."""
    engine, seed = key[0], int(key[1])
    config = JobConfig.parse({**job_of(engine, updates=updates), "seed": seed})
    pythons = {"rollout": engine_python(engine, load_settings().engines_dir)} if engine in ENGINE_PACKAGES else {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        finished = run_job(config, Path(scratch), pythons=pythons)
    series = finished.series("reward/mean")
    curve = Curve(
        engine, seed, config.train.batch_size, [value for _, _, value in series],
        max(value for _, _, value in finished.series("mismatch/logprob")), series[-1][1] - series[0][1],
        round(os.getloadavg()[0], 1),
    )  # fmt: skip
    print(
        f"{engine}, seed {seed}: {curve.rewards[0]:.2f} -> {curve.rewards[-1]:.2f} in {len(series)} updates, "
        f"{curve.seconds:.0f} s at a load of {curve.load}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return asdict(curve)


def apart(figures: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Largest difference between the means of two engines, and the largest one between two seeds of one engine.

    Args:
        figures: of each engine one figure for each seed.
    """
    means = [statistics.fmean(values) for values in figures]
    return max(means) - min(means), max(max(values) - min(values) for values in figures)


def fill(report: Report, curves: list[Curve]) -> None:
    """A row for each engine, and the checks."""
    runs = {name: [one for one in curves if one.engine == name] for name in dict.fromkeys(c.engine for c in curves)}
    for engine, found in runs.items():
        whole, ends = ([statistics.fmean(c.rewards) for c in found], [c.smoothed()[-1] for c in found])
        worst = max(one.mismatch for one in found)
        report.row(
            engine, *(" ".join(f"{value:.3f}" for value in values) for values in (whole, ends)), f"{worst:.1e}",
            f"{statistics.fmean(one.seconds for one in found):.0f}",
        )  # fmt: skip
        report.check(f"{engine}: log-probs within {MISMATCH:g} of the trainer's", worst < MISMATCH)
    if len(runs) > 1 and all(len(found) > 1 for found in runs.values()):
        for what, figure in (
            ("over the whole curve", lambda one: statistics.fmean(one.rewards)),
            (f"over the last {WINDOW} updates", lambda one: one.smoothed()[-1]),
        ):
            engines, seeds = apart([[figure(one) for one in found] for found in runs.values()])
            text = f"mean reward {what}: engines differ by {engines:.3f}, seeds of one engine by {seeds:.3f}"
            report.check(text, engines <= seeds)
    report.results = {"window": WINDOW, "curves": [asdict(curve) for curve in curves]}


def draw(curves: list[Curve], path: Path) -> None:
    """One panel: smoothed reward over updates, a colour per engine, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(curve.engine for curve in curves))}
    for curve in curves:
        values = curve.smoothed()
        label = curve.engine if curve is next(c for c in curves if c.engine == curve.engine) else None
        updates = range(WINDOW, WINDOW + len(values))
        axis.plot(updates, values, color=colours[curve.engine], alpha=0.8, linewidth=1, label=label)
    axis.set_xlabel("policy updates")
    axis.set_ylabel(f"sampled reward, mean of {WINDOW} updates")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Command line; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=OPTIONS, default=["embedded", "vllm"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100, help=f"policy updates of each run, at least {WINDOW}")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; they share the cores")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", action="store_true", help="run nothing, report on the finished runs of --out")
    args = parser.parse_args()
    report = Report(
        f"Sampled reward on one-digit addition after {args.updates} updates, by rollout engine",
        ["engine", "mean of the curve, by seed", f"last {WINDOW} updates, by seed", "mismatch", "s"],
    )
    keys = [
        (name, str(seed), digest(job_of(name, updates=args.updates)))
        for seed, name in product(range(args.seeds), args.engines)
    ]
    finished = Finished(args.out.with_suffix(".runs.jsonl") if args.out else None)
    complete = not args.report and run_all(partial(one_run, args.updates), keys, finished, parallel=args.parallel)
    curves = [Curve(**finished.runs[key]) for key in sorted(keys) if key in finished.runs]
    report.check(f"all {len(keys)} runs finished", len(curves) == len(keys))
    fill(report, curves)
    status = report.finish(args.out.with_suffix(".json") if args.out else None)
    if args.out is not None and curves:
        draw(curves, args.out.with_suffix(".png"))
    if complete:
        finished.remove()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
