"""``penstock sweep``: submits one job file with several values and seeds, and compares the jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from penstock.cli.exits import FAILED, OK
from penstock.cli.jobs.commands import Overrides, load_file
from penstock.cli.printing import Json, console, note, number, show_json, table
from penstock.client import Client
from penstock.client.beside import JobText
from penstock.shared.config.base import with_overrides
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord

__all__ = ["Point", "points_of", "svg_plot", "sweep"]

LAST = 10
"""Number of last metric values of each job; a sweep compares the means of these values."""
POLL_S = 1.0
MAX_JOBS = 200
MOST_COMPARED = 8
"""Maximum number of jobs in the URL of a comparison."""
COLOURS = ("#3366cc", "#dc3912", "#ff9900", "#109618", "#990099", "#0099c6", "#dd4477", "#66aa00")
WIDTH, HEIGHT, LEFT, ROW = 640, 320, 56, 18


@dataclass
class Point:
    """One combination of settings, with one job per seed. ``curves``: ``(update, metric value)`` pairs of each job."""

    settings: tuple[str, ...]
    jobs: list[JobRecord] = field(default_factory=list)
    curves: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Settings of this combination, as one text for users."""
        return " ".join(self.settings) or "as the file says"

    @property
    def ends(self) -> list[float]:
        """Mean of the metric's last values (``LAST`` of them), for each job that has values."""
        return [fmean(value for _, value in curve[-LAST:]) for curve in self.curves if curve]

    @property
    def mean(self) -> float:
        """Mean of ``ends`` over the jobs; -inf if no job has values."""
        return fmean(self.ends) if self.ends else float("-inf")

    @property
    def best(self) -> JobRecord | None:
        """Job whose metric has the highest mean over its last values (``LAST`` of them); None if no job has values."""
        measured = [(job, curve) for job, curve in zip(self.jobs, self.curves, strict=True) if curve]
        ends = dict(zip((job.id for job, _ in measured), self.ends, strict=True))
        return max((job for job, _ in measured), key=lambda job: ends[job.id], default=None)


def points_of(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all combinations of values: for ``["a=1,2", "b=3"]``, ``[("a=1", "b=3"), ("a=2", "b=3")]``.

    Raises ConfigError.
    """
    axes = []
    for text in grid:
        key, sep, values = text.partition("=")
        if not sep or not key.strip() or not all(value.strip() for value in values.split(",")):
            raise ConfigError(f"--grid '{text}' must look like optimizer.learning_rate=1e-4,3e-4")
        axes.append([f"{key.strip()}={value.strip()}" for value in values.split(",")])
    return [tuple(point) for point in itertools.product(*axes)]


def sweep(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Job file (YAML).")],
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=V1,V2", help="Values of a key; several options are combined."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Jobs of each combination, with seeds from 0 on.")] = 1,
    overrides: Overrides = None,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Jobs that run at a time.")] = 1,
    metric: Annotated[str, typer.Option(help="Metric to compare, as the mean of its last 10 values.")] = "reward/mean",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the curves to this SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Submit one job per combination of values and seeds, wait for all, and compare. Ctrl-C leaves them running."""
    points = [Point(settings) for settings in points_of(grid or [])]
    if len(points) * seeds > MAX_JOBS:
        raise ConfigError(f"that makes {len(points) * seeds} jobs, more than {MAX_JOBS}")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot {plot}: the folder {plot.absolute().parent} does not exist")
    text = load_file(file, overrides or [])
    label = f"{text.data['name']}-{time.strftime('%Y%m%d-%H%M%S')}"
    files = [(point, _file_of(text, point, seed, label)) for point in points for seed in range(seeds)]
    with Client() as client:
        count = "1 job" if len(files) == 1 else f"{len(files)} jobs, {parallel} at a time"
        note(f"{count}; list them with: penstock ls --label sweep={label}")
        _run(client, files, parallel)
        for point in points:
            point.jobs = [client.get(job.id) for job in point.jobs]
            point.curves = [_curve(client, job.id, metric) for job in point.jobs]
        url = client.url
        if not any(point.ends for point in points):
            note(f"no job has '{metric}'; there are: {', '.join(_metrics(client, points)) or 'none'}")
    points.sort(key=lambda point: point.mean, reverse=True)
    if plot is not None:
        plot.write_text(svg_plot(points, metric), encoding="utf-8")
        note(f"curves: {plot}")
    if as_json:
        show_json({"sweep": label, "metric": metric, "points": [_plain(point) for point in points]})
    else:
        head = ("SETTINGS", f"{metric}#", "LEAST#", "MOST#", "JOBS#", "BEST JOB", "WARNINGS")
        console().print(table(head, [_row(point) for point in points]))
        _tell_next(points, url)
    done = all(job.status.phase == "succeeded" for point in points for job in point.jobs)
    raise typer.Exit(OK if done else FAILED)


def _file_of(text: JobText, point: Point, seed: int, label: str) -> JobText:
    """Return the validated job file for one combination of settings and one seed of a sweep. Raises ConfigError."""
    changed = with_overrides(text.data, [*point.settings, f"seed={seed}"])
    labels = {"sweep": label, "settings": point.name, "seed": str(seed)}
    data = {**changed, "metadata": {**changed.get("metadata", {}), **labels}}
    parse_job(data, where=f"the job file with {point.name}")
    return replace(text, data=data)


def _run(client: Client, files: Sequence[tuple[Point, JobText]], parallel: int) -> None:
    """Submit the jobs in order, so that at most ``parallel`` run at once, and wait for all."""
    active: list[JobRecord] = []
    for point, text in files:
        while len(active) >= parallel:
            active = _still_active(client, active)
        record = client.submit(text)
        note(f"{record.id}  {point.name}  seed {text.data['seed']}")
        point.jobs.append(record)
        active.append(record)
    while active:
        active = _still_active(client, active)


def _still_active(client: Client, jobs: Sequence[JobRecord]) -> list[JobRecord]:
    found = [client.get(job.id) for job in jobs]
    left = [job for job in found if job.status.phase not in TERMINAL_PHASES]
    for job in found:
        if job not in left:
            message = f": {job.status.message}" if job.status.message else ""
            note(f"{job.id}  {job.status.phase}, reward {number(job.status.reward)}{message}")
    if len(left) == len(jobs):
        time.sleep(POLL_S)
    return left


def _curve(client: Client, job: str, metric: str) -> list[tuple[int, float]]:
    found = client.metrics(job, names=metric, max_points=10_000)
    values = found["series"].get(metric, [])
    return [(step, value) for step, value in zip(found["steps"], values, strict=False) if value is not None]


def _metrics(client: Client, points: Sequence[Point]) -> list[str]:
    """Return the names of all metrics of the jobs."""
    return sorted({row.name for point in points for job in point.jobs for row in client.metric_names(job.id)})


def _row(point: Point) -> tuple[str, ...]:
    return (
        point.name,
        *(number(of(point.ends)) if point.ends else "" for of in (fmean, min, max)),
        str(len(point.jobs)),
        point.best.id if point.best is not None else "",
        ", ".join(sorted({warning.kind for job in point.jobs for warning in job.status.warnings})),
    )


def _tell_next(points: Sequence[Point], url: str) -> None:
    """Print the URL of the curves, and the command that exports the best job. The command names the job by its id."""
    jobs = [job.id for point in points for job in point.jobs][:MOST_COMPARED]
    note(f"curves: {url}/#/compare?jobs={','.join(jobs)}")
    if (best := points[0].best) is not None:
        which = "@best" if best.status.best_checkpoint is not None else ""  # default: the final checkpoint
        note(f"the best one: penstock export {best.id}{which} --to DIRECTORY")


def _plain(point: Point) -> dict[str, Any]:
    jobs = [{"id": job.id, "phase": job.status.phase, "warnings": job.status.warnings} for job in point.jobs]
    return {"settings": list(point.settings), "mean": point.mean if point.ends else None, "ends": point.ends,
            "best": None if point.best is None else point.best.id, "jobs": jobs}  # fmt: skip


def svg_plot(points: Sequence[Point], metric: str) -> str:
    """Return the curves as SVG: one color per point, one line per job, the range of both axes, and a legend."""
    known = [pair for point in points for curve in point.curves for pair in curve]
    steps, values = [step for step, _ in known] or [0], [value for _, value in known] or [0.0]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    height = HEIGHT + ROW * (len(points) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(metric)} by update</title><rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{LEFT} 8V{HEIGHT}H{WIDTH - 8}" fill="none" stroke="#888"/>',
        f'<text x="4" y="16">{number(high)}</text><text x="4" y="{HEIGHT}">{number(low)}</text>',
        f'<text x="{LEFT}" y="{HEIGHT + ROW}">update {first}</text>',
        f'<text x="{WIDTH - 8}" y="{HEIGHT + ROW}" text-anchor="end">{last}</text>',
    ]

    def placed(curve: Sequence[tuple[int, float]]) -> Iterator[str]:
        for step, value in curve:
            x = LEFT + (WIDTH - 8 - LEFT) * (step - first) / ((last - first) or 1)
            yield f"{x:.1f},{HEIGHT - (HEIGHT - 8) * (value - low) / ((high - low) or 1):.1f}"

    for place, point in enumerate(points):
        colour, y = COLOURS[place % len(COLOURS)], HEIGHT + ROW * (place + 2)
        lines += [f'<polyline points="{" ".join(placed(curve))}" fill="none" stroke="{colour}"/>'
                  for curve in point.curves if curve]  # fmt: skip
        lines.append(f'<text x="{LEFT}" y="{y}" fill="{colour}">{escape(point.name)}</text>')
    return "\n".join([*lines, "</svg>\n"])
