"""How long periodic evaluations keep a run waiting: the addition example with and without them.

    python benchmarks/evaluation.py [--updates 60] [--every 10] [--prompts 100] [--out FILE.json]

A batch is not sealed past a version that is still being evaluated, so that every completion comes from it. The draws of
that batch are generated meanwhile, so only what remains of the evaluation when they are all there is lost. Columns:
seconds of an update that follows no evaluation; of an evaluation; for which a ready batch was held (medians); and what
share of the run was held.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

import yaml
from report import Report
from service_run import run_job

from penstock.shared.config.jobs.job import JobConfig

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "addition.yaml"


def measure(max_lag: int, *, updates: int, every: int, prompts: int) -> dict[str, float]:
    """One run; seconds are medians."""
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["train"] |= {"max_updates": updates, "max_lag": max_lag}
    spec["evaluation"] = {"every": every, "num_prompts": prompts, "at_start": False, "at_end": False}
    del spec["early_stop"]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        run = run_job(JobConfig.parse(spec), Path(scratch))
    walls = [(step, wall) for step, wall, _ in run.series("reward/mean")]
    gaps = {step: wall - before for (_, before), (step, wall) in itertools.pairwise(walls)}
    after = {step + 1 for step, _, _ in run.series("eval/seconds")}
    held = [value for _, _, value in run.series("eval/held_seconds")]
    return {
        "max_lag": max_lag,
        "update_s": statistics.median(gap for step, gap in gaps.items() if step not in after),
        "evaluation_s": statistics.median(value for _, _, value in run.series("eval/seconds")),
        "held_s": statistics.median(held),
        "held_share": sum(held) / (walls[-1][1] - walls[0][1]),
    }


def main() -> int:
    """Print a table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report(
        f"Evaluations of {args.prompts} prompts every {args.every} updates",
        ["max_lag", "update s", "evaluation s", "held s", "held / run"],
    )
    for max_lag in (0, 1):
        row = measure(max_lag, updates=args.updates, every=args.every, prompts=args.prompts)
        seconds = (f"{row[name]:.3f}" for name in ("update_s", "evaluation_s", "held_s"))
        report.row(str(max_lag), *seconds, f"{row['held_share']:.1%}")
        report.check(
            f"max_lag {max_lag}: no batch waits longer than the evaluation", row["held_s"] <= row["evaluation_s"]
        )
        report.results[f"max_lag {max_lag}"] = row
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
