"""Tables of runs of several systems in Markdown: speed, learning, and Penstock's own account."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from statistics import fmean, median

from grpo.task import BATCH, Run, reached

__all__ = [
    "Speed",
    "account_table",
    "cpu_ratio",
    "learning_table",
    "markdown",
    "ratio",
    "samples_to",
    "speed",
    "speed_table",
]

WARM_UP, WINDOW = 10, 10


class Speed:
    """Seconds per step of one run, after the warm-up.

    ``wall_s`` is the median over all windows of ten steps, because pipelined steps come in uneven pairs and a shared
    machine has bad moments; ``mean_s`` is the plain mean; ``cpu_s`` counts all processes.
    """

    def __init__(self, run: Run) -> None:
        steps = run.steps[WARM_UP:]
        if len(steps) <= WINDOW:
            raise ValueError(
                f"{run.system}: {len(run.steps)} steps are too few for a speed; at least {WARM_UP + WINDOW + 1}"
            )
        times = [step.time for step in steps]
        windows = [(b - a) / WINDOW for a, b in zip(times, times[WINDOW:], strict=False)]
        self.wall_s = median(windows)
        self.mean_s = (times[-1] - times[0]) / (len(times) - 1)
        self.cpu_s = (steps[-1].cpu_s - steps[0].cpu_s) / (len(steps) - 1)
        self.tokens = sum(step.tokens for step in steps) / len(steps)


def speed(runs: Sequence[Run]) -> list[Speed]:
    """One for each run."""
    return [Speed(run) for run in runs]


def ratio(reference: Sequence[Run], runs: Sequence[Run]) -> float:
    """How many times faster than the reference: the median over paired runs."""
    return median(r.wall_s / s.wall_s for r, s in zip(speed(reference), speed(runs), strict=True))


def cpu_ratio(reference: Sequence[Run], runs: Sequence[Run]) -> float:
    """How many times less CPU time than the reference; holds on a busy machine too."""
    return median(r.cpu_s / s.cpu_s for r, s in zip(speed(reference), speed(runs), strict=True))


def speed_table(found: dict[str, list[Run]], reference: str) -> str:
    """Seconds per step and what follows from it."""
    columns = ["system", "s/step", "mean s/step", "samples/s", "x TRL", "CPU s/step", "x TRL, CPU", "tokens/step"]
    columns.append("start-up s")
    rows = []
    for system, runs in found.items():
        speeds = speed(runs)
        wall = median(s.wall_s for s in speeds)
        beside = [f"{of(found[reference], runs):.2f}" if reference in found else "-" for of in (ratio, cpu_ratio)]
        rows.append(
            [
                system, f"{wall:.4f}", f"{median(s.mean_s for s in speeds):.4f}", f"{BATCH / wall:.0f}", beside[0],
                f"{median(s.cpu_s for s in speeds):.4f}", beside[1], f"{median(s.tokens for s in speeds):.0f}",
                f"{median(run.startup_s for run in runs):.1f}",
            ]
        )  # fmt: skip
    return markdown(columns, rows)


def learning_table(found: dict[str, list[Run]], goal: float) -> str:
    """Seconds, updates and samples until the goal, run by run."""
    columns = ["system", f"s to {goal:g}", "median", "updates", "median samples", "last 10"]
    rows = []
    for system, runs in found.items():
        ends = [reached([step.reward for step in run.steps], goal) for run in runs]
        seconds = [run.steps[end - 1].time - run.start for run, end in zip(runs, ends, strict=True) if end]
        updates = [end for end in ends if end]
        samples = samples_to(runs, goal)
        last = [sum(step.reward for step in run.steps[-10:]) / 10 for run in runs]
        rows.append(
            [
                system, _list(seconds, ".0f", len(runs)), f"{median(seconds):.0f}" if seconds else "-",
                _list(updates, "d", len(runs)), f"{samples:.0f}" if samples < inf else "-",
                _list(last, ".3f", len(runs)),
            ]
        )  # fmt: skip
    return markdown(columns, rows)


def samples_to(runs: Sequence[Run], goal: float) -> float:
    """Median number of samples until the goal; infinite where a run of them did not get there."""
    ends = [reached([step.reward for step in run.steps], goal) for run in runs]
    return median(BATCH * end if end else inf for end in ends)


def account_table(found: dict[str, list[Run]]) -> str:
    """Where a step of Penstock goes: trainer by stage (adds up to the wall time), and CPU by process.

    Milliseconds, means over the runs: medians of parts would not add up.
    """
    accounts = {
        system: [run.facts["account"] for run in runs if run.facts.get("account")] for system, runs in found.items()
    }
    accounts = {system: kept for system, kept in accounts.items() if kept}
    names: dict[tuple[str, str], None] = {}
    for kept in accounts.values():
        for one in kept:
            names.update(dict.fromkeys((part, name) for part, values in one.items() for name in values))
    rows = [
        [part if part == name else f"{part}: {name}", *(_mean_ms(kept, part, name) for kept in accounts.values())]
        for part, name in names
    ]
    return markdown(["ms per step", *accounts], rows)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An aligned table; all columns but the first to the right."""
    table = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    lines = [
        [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in table
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def _mean_ms(kept: list[dict[str, dict[str, float]]], part: str, name: str) -> str:
    return f"{1000 * fmean(one[part].get(name, 0.0) for one in kept):.1f}"


def _list(values: Sequence[float], form: str, number: int) -> str:
    missing = ["never"] * (number - len(values))
    return ", ".join([*(format(value, form) for value in values), *missing])
