"""Reinforcement learning beside more of the same supervised training, on the calculator expressions of GSM8K.

    python benchmarks/gsm8k_calc.py --train train.jsonl --test test.jsonl [--seeds 3] [--out docs/results/gsm8k_calc]

Each seed runs ``examples/gsm8k-calc.yaml`` through the services: supervised warm start to a plateau, then GRPO. The
same trainer then continues the supervised training from the checkpoint of version 0, once for each of ``--sft-rates``
(times the rate of the warm start), for the wall time of the RL run; evaluation counts as time of the RL run, not of
these arms. The score is greedy exact match on the expressions of the test file that the train file lacks.
``--practice N`` shows the RL run N made-up expressions instead of those of the train file: a checker needs nobody to
annotate what it judges. ``--out STEM`` writes STEM.json and STEM.png.
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

from penstock.shared.config.job import JobConfig
from penstock.shared.data.calculator import find_annotations

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gsm8k-calc.yaml"
GOAL = 0.05


def config_of(args: argparse.Namespace, seed: int, scratch: Path) -> JobConfig:
    """The example with the given files and seed. What is made up to be practised is written to ``scratch``."""
    spec = yaml.safe_load(EXAMPLE.read_text())
    train, test = str(args.train.resolve()), str(args.test.resolve())
    spec["seed"] = seed
    spec["data"]["train"] |= {"path": train}
    spec["data"]["eval"] |= {"path": test, "exclude_path": train}
    for source in spec["warm_start"].get("data", []):
        source |= {"path": train}
    if args.practice:
        longest = spec["data"]["eval"]["max_chars"]
        short, tested = (
            {expression for expression, _ in find_annotations(file) if len(expression) <= longest}
            for file in (args.train, args.test)
        )
        practice = scratch / "practice.jsonl"
        write_practice(practice, sorted(short), frozenset(short | tested), count=args.practice, seed=seed)
        spec["data"]["train"] = {"type": "file", "path": str(practice)}
    return JobConfig.parse(spec)


def one_seed(args: argparse.Namespace, seed: int) -> Seed:
    """RL through the services, then every supervised arm from the same version 0."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        config = config_of(args, seed, Path(scratch))
        rl, checkpoint = run_arm(config, Path(scratch))
        _tell(seed, rl)
        arms = []
        for factor in args.sft_rates:
            rate = factor * config.warm_start.learning_rate
            arm = continue_supervised(config, checkpoint, rate=rate, wall_s=rl.seconds[-1], points=len(rl.values) - 1)
            _tell(seed, arm)
            arms.append(arm)
    return Seed(seed, rl, arms)


def _tell(seed: int, curve: Curve) -> None:
    ends = f"{curve.values[0]:.3f} -> {curve.values[-1]:.3f} in {curve.seconds[-1]:.0f} s, {curve.steps[-1]} steps"
    print(f"seed {seed}, {curve.name}: {ends}", file=sys.stderr, flush=True)


def fill(report: Report, seeds: list[Seed], *, parallel: int) -> None:
    """Rows, means and the target. An arm counts with its last point, the best arm of each seed is compared."""
    gains = []
    for seed in seeds:
        best = max(arm.values[-1] for arm in seed.supervised)
        gains.append(seed.rl.values[-1] - best)
        arms = [_percent(arm.values[-1]) for arm in seed.supervised]
        report.row(
            str(seed.seed), _percent(seed.rl.values[0]), *arms, _percent(seed.rl.values[-1]), f"{100 * gains[-1]:+.1f}",
            f"{seed.rl.seconds[-1]:.0f}",
        )  # fmt: skip
    report.results = {"parallel": parallel, "seeds": [asdict(seed) for seed in seeds], "gain": gains}
    report.check(
        f"RL is at least {100 * GOAL:.0f} points above the best continued supervised arm, mean of {len(seeds)} seeds: "
        f"{100 * statistics.fmean(gains):+.1f} (least {100 * min(gains):+.1f})",
        statistics.fmean(gains) >= GOAL,
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def main() -> int:
    """Command line; the exit status is 1 if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--test", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--practice", type=int, default=0, help="made-up expressions to practise")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sft-rates", type=float, nargs="+", default=[1.0, 0.1], help="times the warm start's rate")
    parser.add_argument("--parallel", type=int, default=1, help="seeds at once; they share the cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    columns = ["seed", "plateau", *(f"supervised x{rate:g}" for rate in args.sft_rates), "RL", "RL - best", "wall s"]
    report = Report("GSM8K calculator: greedy exact match in % on held-out expressions", columns)
    with ProcessPoolExecutor(args.parallel, mp_context=multiprocessing.get_context("spawn")) as pool:
        seeds = list(pool.map(partial(one_seed, args), range(args.seeds)))
    fill(report, seeds, parallel=args.parallel)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        draw(seeds, args.out.with_suffix(".png"))
    return report.finish(args.out.with_suffix(".json") if args.out else None)


if __name__ == "__main__":
    raise SystemExit(main())
