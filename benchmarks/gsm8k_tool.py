"""Does a policy learn to call its tool? The calculator annotations of GSM8K as episodes, through the services.

    python benchmarks/gsm8k_tool.py --train train.jsonl --test test.jsonl [--seeds 3] [--out FILE.json]

Each run is ``examples/gsm8k-tool.yaml``: after `48/2=` the policy calls the calculator, `[48/2]`, the env service
answers `24;`, and the policy writes the answer. A short supervised warm start shows such episodes (version 0), then
GRPO practises, told only whether the last turn is right. The score is exact match on expressions of the test file that
the train file lacks, of sampled and of greedy episodes. The target: with every seed the sampled score rises by at least
20 points. With ``--out FILE.json`` each run is kept in FILE.runs.jsonl as it finishes: the same command goes on after
an interruption.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from report import Report
from resumable import Finished, digest, run_all
from service_run import run_job

from penstock.shared.config.jobs.job import JobConfig

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gsm8k-tool.yaml"
SAMPLES = 4
SAMPLED, GREEDY, OBSERVED = f"eval/avg@{SAMPLES}", "eval/greedy", "tokens/observed"
GAIN = 0.2


@dataclass
class Run:
    """One run. Rows of the curves are ``[policy version, seconds since version 0, score]``."""

    seed: int
    sampled: list[list[float]]
    greedy: list[list[float]]
    observed: float
    """Tokens that the tool wrote, in the updates together."""
    load: float

    @property
    def gain(self) -> float:
        """Of the sampled score."""
        return self.sampled[-1][2] - self.sampled[0][2]


def config_of(train: Path, test: Path, *, seed: int, prompts: int) -> dict[str, Any]:
    """The job file of one run: the example with the given files."""
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    spec["seed"] = seed
    spec["data"]["train"] |= {"path": str(train.resolve())}
    spec["data"]["eval"] |= {"path": str(test.resolve()), "exclude_path": str(train.resolve())}
    spec["evaluation"] |= {"num_prompts": prompts, "samples": SAMPLES, "greedy": True}
    return spec


def one_run(train: Path, test: Path, prompts: int, key: tuple[str, ...]) -> dict[str, Any]:
    """The job once, to its end; its audit passes."""
    seed = int(key[0])
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        finished = run_job(JobConfig.parse(config_of(train, test, seed=seed, prompts=prompts)), Path(scratch))
    began = next(event["time"] for event in finished.events if event["type"] == "checkpoint")
    curves = {
        name: [[step, round(max(0.0, wall - began), 1), value] for step, wall, value in finished.series(name)]
        for name in (SAMPLED, GREEDY)
    }
    observed = sum(value for _, _, value in finished.series(OBSERVED))
    run = Run(seed, curves[SAMPLED], curves[GREEDY], observed, round(os.getloadavg()[0], 1))
    print(f"seed {seed}: {run.sampled[0][2]:.3f} -> {run.sampled[-1][2]:.3f}", file=sys.stderr, flush=True)
    return asdict(run)


def fill(report: Report, runs: list[Run]) -> None:
    """A row for each run, and the target."""
    for run in runs:
        (_, _, before), (updates, seconds, after) = run.sampled[0], run.sampled[-1]
        report.row(
            str(run.seed), f"{100 * before:.1f}", f"{100 * after:.1f}", f"{100 * run.gain:+.1f}",
            f"{100 * run.greedy[0][2]:.1f}", f"{100 * run.greedy[-1][2]:.1f}", f"{updates:.0f}", f"{seconds:.0f}",
            f"{run.load:.1f}",
        )  # fmt: skip
    report.results = {"samples": SAMPLES, "runs": [asdict(run) for run in runs]}
    if runs:
        gains = [run.gain for run in runs]
        report.check(
            f"the sampled score rises by at least {100 * GAIN:.0f} points with each of {len(runs)} seeds: "
            f"{100 * statistics.fmean(gains):+.1f} on average, {100 * min(gains):+.1f} at least",
            min(gains) >= GAIN,
        )


def main() -> int:
    """Command line; the exit status is 1 if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--test", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=200, help=f"held-out expressions, {SAMPLES} episodes of each")
    parser.add_argument("--parallel", type=int, default=1, help="seeds at once; they share the cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    columns = [
        "seed",
        "sampled, version 0",
        "sampled, end",
        "gain",
        "greedy, version 0",
        "greedy, end",
        "updates",
        "s",
        "load",
    ]
    report = Report("GSM8K calculator as a tool: exact match in % on held-out expressions", columns)
    same = digest({"job": yaml.safe_load(EXAMPLE.read_text()), "prompts": args.prompts})
    keys = [(str(seed), same) for seed in range(args.seeds)]
    finished = Finished(args.out.with_suffix(".runs.jsonl") if args.out else None)
    complete = run_all(partial(one_run, args.train, args.test, args.prompts), keys, finished, parallel=args.parallel)
    runs = [Run(**finished.runs[key]) for key in keys if key in finished.runs]
    report.check(f"all {len(keys)} runs finished", len(runs) == len(keys))
    fill(report, runs)
    status = report.finish(args.out)
    if complete:
        finished.remove()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
