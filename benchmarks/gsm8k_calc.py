"""Reinforcement learning beside more of the same supervised training, on the calculator expressions of GSM8K.

    python benchmarks/gsm8k_calc.py --train train.jsonl --test test.jsonl [--seeds 3] [--out docs/results/gsm8k_calc]

Each seed runs ``examples/gsm8k-calc.yaml`` through the services: supervised warm start (version 0), then GRPO. A
second run begins in the same way and practises ``--practice`` made-up expressions instead of those of the train file:
a checker needs nobody to annotate what it judges. The same trainer then continues the supervised training from the
checkpoint of version 0, once for each of ``--sft-rates`` (times the rate of the warm start), for the wall time of the
longer RL run; evaluation counts as time of the RL runs, not of these arms. The score is greedy exact match on the
expressions of the test file that the train file lacks. ``--out STEM`` writes STEM.json and STEM.png.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import yaml
from calc.continued import continue_supervised
from calc.curve import Curve, Seed, draw
from calc.penstock_run import run_arm
from calc.practice import write_practice
from report import Report

from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.calculator import find_annotations

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gsm8k-calc.yaml"
GOAL = 0.05
FILE, MADE_UP = "RL, prompts of the train file", "RL, made-up prompts"


def config_of(args: argparse.Namespace, seed: int, practice: Path | None = None) -> JobConfig:
    """The example with the given files and seed; where ``practice`` is given, RL practises made-up expressions.

    They are written to that file, and none of them is in the train file or the test file.
    """
    spec = yaml.safe_load(EXAMPLE.read_text())
    train, test = str(args.train.resolve()), str(args.test.resolve())
    spec["seed"] = seed
    spec["data"]["train"] |= {"path": train}
    spec["data"]["eval"] |= {"path": test, "exclude_path": train}
    for source in spec["warm_start"].get("data", []):
        source |= {"path": train}
    if practice is not None:
        longest = spec["data"]["eval"]["max_chars"]
        short, tested = (
            {expression for expression, _ in find_annotations(file) if len(expression) <= longest}
            for file in (args.train, args.test)
        )
        write_practice(practice, sorted(short), frozenset(short | tested), count=args.practice, seed=seed)
        spec["data"]["train"] = {"type": "file", "path": str(practice)}
    return JobConfig.parse(spec)


def one_seed(args: argparse.Namespace, seed: int) -> Seed:
    """RL through the services, then every supervised arm from the same version 0."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        config, directory = config_of(args, seed), Path(scratch)
        rl, checkpoint = run_arm(FILE, config, directory / "file")
        reinforced = [rl]
        if args.practice:
            made_up = config_of(args, seed, directory / "practice.jsonl")
            reinforced.append(run_arm(MADE_UP, made_up, directory / "made-up")[0])
        wall_s = max(curve.seconds[-1] for curve in reinforced)
        supervised = [
            continue_supervised(
                config, checkpoint, rate=factor * config.warm_start.learning_rate, wall_s=wall_s,
                points=len(rl.values) - 1,
            )
            for factor in args.sft_rates
        ]  # fmt: skip
    for curve in (*reinforced, *supervised):
        _tell(seed, curve)
    return Seed(seed, reinforced, supervised)


def _tell(seed: int, curve: Curve) -> None:
    ends = f"{curve.values[0]:.3f} -> {curve.values[-1]:.3f} in {curve.seconds[-1]:.0f} s, {curve.steps[-1]} steps"
    print(f"seed {seed}, {curve.name}: {ends}", file=sys.stderr, flush=True)


def fill(report: Report, seeds: list[Seed], *, parallel: int) -> None:
    """Rows, means and the target: the last point of each RL run beside that of the better supervised arm."""
    gains: dict[str, list[float]] = {curve.name: [] for curve in seeds[0].rl}
    for seed in seeds:
        best = max(arm.values[-1] for arm in seed.supervised)
        cells = []
        for curve in seed.rl:
            gains[curve.name].append(curve.values[-1] - best)
            cells += [_percent(curve.values[-1]), f"{100 * gains[curve.name][-1]:+.1f}"]
        arms = [_percent(arm.values[-1]) for arm in seed.supervised]
        wall_s = max(curve.seconds[-1] for curve in seed.rl)
        report.row(str(seed.seed), _percent(seed.rl[0].values[0]), *arms, *cells, f"{wall_s:.0f}")
    report.results = {"parallel": parallel, "seeds": [asdict(seed) for seed in seeds], "gain": gains}
    for name, found in gains.items():
        report.check(
            f"{name} is at least {100 * GOAL:.0f} points above the best continued supervised arm, mean of {len(seeds)} "
            f"seeds: {100 * statistics.fmean(found):+.1f} (least {100 * min(found):+.1f})",
            statistics.fmean(found) >= GOAL,
        )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def main() -> int:
    """Command line; the exit status is 1 if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--test", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--practice", type=int, default=6000, help="made-up expressions; 0: without that run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sft-rates", type=float, nargs="+", default=[1.0, 0.1], help="times the warm start's rate")
    parser.add_argument("--parallel", type=int, default=1, help="seeds at once; they share the cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    arms = [FILE, MADE_UP] if args.practice else [FILE]
    columns = ["seed", "version 0", *(f"supervised x{rate:g}" for rate in args.sft_rates)]
    columns += [column for arm in arms for column in (arm, "- best")] + ["wall s"]
    report = Report("GSM8K calculator: greedy exact match in % on held-out expressions", columns)
    with ProcessPoolExecutor(args.parallel, mp_context=multiprocessing.get_context("spawn")) as pool:
        seeds = list(pool.map(partial(one_seed, args), range(args.seeds)))
    fill(report, seeds, parallel=args.parallel)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    status = report.finish(args.out.with_suffix(".json") if args.out else None)
    if args.out is not None:
        draw(seeds, args.out.with_suffix(".png"))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
