"""Does a served policy learn from live feedback, also beside a hostile key? Three seeds each, through the services.

    python benchmarks/online.py [--seeds 3] [--kinds honest hostile] [--limit-s S] [--out STEM] [--report]

Each run is `penstock demo online`: a scripted agent asks a small policy through OpenAI's SDK and posts what it thinks
of the answers, some late, some twice, some corrected out of order. The hostile runs have a second key beside it that
sends nine tenths of the traffic and says the opposite of the truth about its own answers; the agent's customers have a
key each, and no key may have more than 15 % of a batch. A run ends once 0.8 of the agent's newest 200 answers are
accepted, or at its limit.

The targets, for every seed: accepted at most 0.35 of the first 200 answers and at least 0.8 of the last 200, no request
fails, the audit passes (which includes the shares of every batch), and the hostile key had nine tenths of the answers.
``--out STEM`` writes STEM.json and STEM.png, and each run to STEM.runs.jsonl as it finishes: the same command goes on
after an interruption.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from report import Report
from resumable import Finished, digest, run_all

from penstock.cli.demo.agent import WINDOW, Answer
from penstock.cli.demo.command import demo_options
from penstock.cli.demo.online import GOAL, LIMIT_S, START, load_online_job, run_online, summary

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "online.yaml"
HONEST, HOSTILE = "honest", "hostile"
TRAFFIC = 0.9
"""Share of the answers that the hostile key must have had."""
EVERY = 20
"""Answers between two points of a curve."""


@dataclass
class Run:
    """One run. ``curve`` has a row ``[answers, seconds, version, rate over the last WINDOW]`` for each point."""

    kind: str
    seed: int
    start: float
    end: float
    answers: int
    seconds: float
    versions: int
    traffic: float
    influence: float
    failures: list[str]
    violations: list[str]
    curve: list[list[float]]
    load: float


def one_run(limit_s: float, key: tuple[str, ...]) -> dict[str, Any]:
    """The demo once."""
    kind, seed = key[0], int(key[1])
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        directory, hostile = Path(scratch), kind == HOSTILE
        job = load_online_job(EXAMPLE, [f"seed={seed}"], directory, hostile=hostile)
        shown = asyncio.run(run_online(job, demo_options(directory), hostile=hostile, limit_s=limit_s))
        print("\n".join(summary(shown, directory)), file=sys.stderr, flush=True)
    agent, report = shown.agent, shown.report
    return asdict(
        Run(
            kind, seed, agent.start, shown.rate, len(agent.answers), round(shown.seconds, 1), agent.version + 1,
            shown.traffic, shown.influence, shown.failures[:10], [] if report["ok"] else report["violations"][:10],
            curve_of(agent.answers, shown.began), round(os.getloadavg()[0], 1),
        )
    )  # fmt: skip


def curve_of(answers: list[Answer], began: float) -> list[list[float]]:
    """A point every so many answers, from the first full window."""
    points = []
    for end in range(WINDOW, len(answers) + 1, EVERY):
        last = answers[end - 1]
        rate = sum(answer.accepted for answer in answers[end - WINDOW : end]) / WINDOW
        points.append([end, round(last.time - began, 1), last.version, round(rate, 3)])
    return points


def fill(report: Report, runs: list[Run]) -> None:
    """A row for each run, and the checks."""
    for run in runs:
        hostile = (f"{run.traffic:.0%}", f"{run.influence:.0%}") if run.kind == HOSTILE else ("", "")
        report.row(
            f"{run.kind}, seed {run.seed}", f"{run.start:.2f}", f"{run.end:.2f}", str(run.answers), str(run.versions),
            f"{run.seconds:.0f}", *hostile, str(len(run.failures)), f"{run.load:.1f}",
        )  # fmt: skip
    for kind in dict.fromkeys(run.kind for run in runs):
        same = [run for run in runs if run.kind == kind]
        rises = all(run.start <= START and run.end >= GOAL for run in same)
        report.check(f"{kind}: accepted from <= {START} to >= {GOAL}, {len(same)} seeds", rises)
        report.check(f"{kind}: no request failed", not any(run.failures for run in same))
        report.check(f"{kind}: the audit passes", not any(run.violations for run in same))
        if kind == HOSTILE:
            flood = all(run.traffic >= TRAFFIC for run in same)
            report.check(f"{kind}: {TRAFFIC:.0%} of all answers went to the hostile key", flood)
    report.results = {"window": WINDOW, "goal": GOAL, "start": START, "runs": [asdict(run) for run in runs]}


def draw(runs: list[Run], path: Path) -> None:
    """Accepted rate over the answers that the agent got: a colour for each kind, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    labels = {HONEST: "the agent alone", HOSTILE: "beside a hostile key with 90 % of the traffic"}
    told: set[str] = set()
    for run in runs:
        label = None if run.kind in told else labels[run.kind]
        told.add(run.kind)
        colour = "C0" if run.kind == HONEST else "C3"
        axis.plot([point[0] for point in run.curve], [point[3] for point in run.curve], color=colour, label=label)
    for level in (START, GOAL):
        axis.axhline(level, color="black", linewidth=0.6, linestyle=":")
    axis.set(xlabel="answers to the agent", ylabel=f"accepted, of the last {WINDOW}", ylim=(0, 1), xlim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Command line; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=[HONEST, HOSTILE], default=[HONEST, HOSTILE])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="end a run after so many seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", action="store_true", help="run nothing, report on the finished runs of --out")
    args = parser.parse_args()
    columns = ["run", "start", "end", "answers", "versions", "s", "hostile traffic", "of trained", "failed", "load"]
    report = Report("Accepted answers of a policy that learns from live feedback", columns)
    same = digest({"job": yaml.safe_load(EXAMPLE.read_text()), "limit_s": args.limit_s})
    keys = [(kind, str(seed), same) for kind, seed in product(args.kinds, range(args.seeds))]
    finished = Finished(args.out.with_suffix(".runs.jsonl") if args.out else None)
    complete = not args.report and run_all(partial(one_run, args.limit_s), keys, finished, parallel=1)
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
