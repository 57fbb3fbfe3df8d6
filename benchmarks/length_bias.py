"""What aggregations and overlong rules do to the length of wrong answers, on a task with ragged answers.

    python benchmarks/length_bias.py [--arms token_mean ...] [--seeds 3] [--parallel 2] [--out STEM] [--report]

``examples/ragged/sorting.yaml``: put symbols in their order. A quarter of the demonstrations of the warm start go
astray: from a random place on they are random symbols. An answer that went astray is lost, whatever its length, so its
length must not change. The weight that a loss gives to the tokens of an answer decides whether it does:

    expected gradient after the mistake = |A| E[w(length) grad log pi],  0 for a constant w, since E[grad log pi] = 0

One weight for all tokens (``token_mean``, ``constant``) leaves it alone; ``sequence_mean`` (w = 1 / length) and
``overlong_filter`` (w = 0 at the limit) make wrong answers longer; a punishment of length makes them shorter.

Learner and sampler run in one process, without services. The arms of a seed start from the same version 0. ``--out
STEM`` writes STEM.json and STEM.png, and each run to STEM.runs.jsonl as it finishes; the same command goes on there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from length.loop import Lengths, Loop
from report import Report
from resumable import Finished, digest, run_all

from penstock.shared.config.job import JobConfig

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "ragged" / "sorting.yaml"
ARMS: dict[str, dict[str, Any]] = {
    "token_mean": {"aggregation": "token_mean"},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "overlong_filter": {"overlong_filter": True},
    "soft_punishment": {"overlong_punishment": {"buffer": 0.75, "coef": 0.5}},
    "constant": {"type": "dr_grpo"},
}
"""What each arm changes in the algorithm of the job file."""
RIGHT_RULE, WRONG_RULES = "token_mean", ("sequence_mean", "overlong_filter")
LONGER, SAME = 1.15, 1.15
"""Tokens after a mistake: under a wrong rule at least this factor of those under the right rule with the same seed;
under the others at most this factor of version 0."""
PROMPTS, EACH = 64, 8


@dataclass
class Run:
    """One arm of one seed. ``updates`` are of the training batches, the other two of held-out prompts."""

    arm: str
    seed: int
    updates: list[Lengths]
    start: Lengths
    end: Lengths
    seconds: float

    @property
    def growth(self) -> float:
        """Tokens after the mistake at the end, relative to version 0."""
        return (self.end.astray or 0.0) / (self.start.astray or 1.0)


def job_of(arm: str) -> dict[str, Any]:
    """The example with the arm's changes."""
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    kept = {} if "type" in ARMS[arm] else spec["algorithm"]
    return {**spec, "algorithm": {"group_size": spec["algorithm"]["group_size"], **kept, **ARMS[arm]}}


def one_run(starts: Path, key: tuple[str, ...]) -> dict[str, Any]:
    """Train one arm of one seed."""
    torch.set_num_threads(1)
    arm, seed = key[0], int(key[1])
    config = JobConfig.parse({**job_of(arm), "seed": seed})
    warm = digest({**job_of(arm), "algorithm": None})
    loop, began = Loop(config, starts / f"{warm}-{seed}.pt"), time.time()
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


def load(record: dict[str, Any]) -> Run:
    """Inverse of ``asdict``."""
    updates = [Lengths(**lengths) for lengths in record["updates"]]
    return Run(**{**record, "updates": updates, "start": Lengths(**record["start"]), "end": Lengths(**record["end"])})


def fill(report: Report, runs: list[Run]) -> None:
    """A row and a check for each arm."""
    for arm in ARMS:
        own = [run for run in runs if run.arm == arm]
        if not own:
            continue
        growth = [run.growth for run in own]
        report.row(
            arm, f"{_mean(own, 'start', 'right'):.2f}", f"{_mean(own, 'end', 'right'):.2f}",
            f"{_mean(own, 'start', 'wrong_length'):.1f}", f"{_mean(own, 'end', 'wrong_length'):.1f}",
            f"{_mean(own, 'start', 'astray'):.1f}", f"{_mean(own, 'end', 'astray'):.1f}",
            " ".join(f"{factor:.2f}" for factor in growth),
            f"{_mean(own, 'start', 'truncated'):.3f}", f"{_mean(own, 'end', 'truncated'):.3f}",
        )  # fmt: skip
        if arm in WRONG_RULES:
            _check_against_right(report, arm, own, {run.seed: run for run in runs if run.arm == RIGHT_RULE})
        else:
            text = f"{arm}: after a mistake at most {SAME} times the tokens of version 0, each of {len(own)} seeds"
            report.check(text, max(growth) <= SAME)
    report.results = {"held_out": [PROMPTS, EACH], "runs": [asdict(run) for run in runs]}


def _check_against_right(report: Report, arm: str, own: list[Run], right: dict[int, Run]) -> None:
    factors = [(run.end.astray or 0.0) / (right[run.seed].end.astray or 1.0) for run in own if run.seed in right]
    text = f"{arm}: after a mistake at least {LONGER} times the tokens of {RIGHT_RULE}, each of {len(factors)} seeds"
    found = ", ".join(f"{factor:.2f}" for factor in factors)
    report.check(f"{text}: {found}", bool(factors) and min(factors) >= LONGER)


def _mean(runs: list[Run], when: str, what: str) -> float:
    values = [getattr(getattr(run, when), what) for run in runs]
    return statistics.fmean([value for value in values if value is not None] or [float("nan")])


def draw(runs: list[Run], path: Path, window: int = 5) -> None:
    """Three panels over updates: tokens after the mistake, share cut off, share right. A line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4))
    panels = {"astray": "tokens after the mistake", "truncated": "share cut off", "right": "share right"}
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for run in runs:
            series = [(i, getattr(lengths, name)) for i, lengths in enumerate(run.updates)]
            points = [(i, value) for i, value in series if value is not None]
            x = [i for i, _ in points[window - 1 :]]
            y = [statistics.fmean(v for _, v in points[i : i + window]) for i in range(len(points) - window + 1)]
            first = run is next(r for r in runs if r.arm == run.arm)
            colour = f"C{list(ARMS).index(run.arm)}"
            axis.plot(x, y, color=colour, alpha=0.8, linewidth=1, label=run.arm if first else None)
        axis.set_xlabel("updates")
        axis.set_ylabel(f"{label}, mean of {window} updates")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Command line; the exit status is 1 if a prediction failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; they share the cores")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", action="store_true", help="run nothing, report on the finished runs of --out")
    args = parser.parse_args()
    columns = [
        "arm", "right, start", "end", "tokens if wrong, start", "end", "after the mistake, start", "end",
        "factor by seed", "cut off, start", "end",
    ]  # fmt: skip
    report = Report("Wrong answers on the ragged sorting task: held-out prompts, temperature 1", columns)
    finished, starts = Finished(args.out.with_suffix(".runs.jsonl")), args.out.with_suffix(".starts")
    keys = [(arm, str(seed), digest(job_of(arm))) for arm in args.arms for seed in range(args.seeds)]
    complete = not args.report and run_all(partial(one_run, starts), keys, finished, parallel=args.parallel)
    runs = [load(finished.runs[key]) for key in keys if key in finished.runs]
    report.check(f"all {len(keys)} runs finished", len(runs) == len(keys))
    fill(report, runs)
    draw(runs, args.out.with_suffix(".png"))
    status = report.finish(args.out.with_suffix(".json"))
    if complete:
        finished.remove()
        for start in starts.glob("*.pt"):
            start.unlink()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
