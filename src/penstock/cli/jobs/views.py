"""Commands that show what a job does."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from penstock.cli.exits import result_code
from penstock.cli.printing import (
    Job,
    Json,
    console,
    event_line,
    note,
    note_warnings,
    number,
    show_json,
    show_line,
    sparkline,
    table,
)
from penstock.client import Client
from penstock.client.calls import Rows
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.jobs import TERMINAL_PHASES

__all__ = [
    "chart",
    "events",
    "logs",
    "metrics",
    "samples",
    "videos",
    "waits_table",
    "why",
    "workers",
    "workers_table",
]


_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a Braille character, by row (0 to 3) and column (0 or 1)."""


def chart(
    name: str, steps: Sequence[int], values: Sequence[float | None], *, width: int = 72, height: int = 10
) -> list[str]:
    """Return the lines of a chart: its name, ``height`` rows of ``width`` characters with the curve, and the axis.

    With more values than dot columns, a column shows the range of its values.
    """
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not known:
        return [f"{name}: nothing yet"]
    low, high = min(value for _, value in known), max(value for _, value in known)
    first, last = known[0][0], known[-1][0]
    columns, rows = 2 * width, 4 * height
    span = last - first or 1
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for step, value in known:
        column = round((step - first) / span * (columns - 1))
        row = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
        top, bottom = (row, row) if before is None else (min(row, before), max(row, before))
        for place in range(top, bottom + 1):
            cells[place // 4][column // 2] |= _DOTS[place % 4][column % 2]
        before = row
    labels = [number(high), *[""] * (height - 2), number(low)] if height > 1 else [number(high)]
    margin = max(map(len, labels))
    lines = [f"{name}: {number(known[-1][1])}"]
    for label, row_cells in zip(labels, cells, strict=True):
        text = "".join(chr(_BLANK + bits) for bits in row_cells).rstrip(chr(_BLANK))
        lines.append(f"{label:>{margin}} ┤{text}")
    ends = f"{first}{last:>{max(1, width - len(str(first)))}}"
    return [*lines, f"{'':>{margin}} └{ends}"]


Follow = Annotated[bool, typer.Option("--follow", "-f", help="Follow to the end of the job.")]
_LOG_POLL_S = 1.0
DRAWN = "reward/mean"
"""Metric that a curve shows by default."""
HELD_OUT = ("eval/success", "eval/return", "eval/length")
"""Metrics of the held-out episodes of an embodied job."""


def events(
    job: Job,
    follow: Follow = False,
    after: Annotated[int, typer.Option(min=0, help="Only events past this id.")] = 0,
    as_json: Json = False,
) -> None:
    """Show a job's events; with -f follow them to its end (Ctrl-C leaves the job running)."""
    screen = console()
    with Client() as client:
        record = client.find(job)
        try:
            for row in client.events(record.id, after=after, follow=follow):
                if as_json:
                    show_line(row)
                else:
                    screen.print(event_line(row), soft_wrap=True)
        except KeyboardInterrupt:
            note(f"the job goes on; see it again with: penstock events -f {record.id}")
            raise
        if follow:
            raise typer.Exit(result_code(client.get(record.id)))


def metrics(
    *,
    job: Job,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all, newest values.")] = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="Rows of the table.")] = 20,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, every update.")] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw a curve of each; default: of the reward.")] = False,
    as_json: Json = False,
) -> None:
    """Show metrics: a summary of all of them, a table of some, or curves."""
    names = names or ([DRAWN] if plot else None)
    with Client() as client:
        found = client.metrics(client.find(job).id, names=",".join(names) if names else None, max_points=10_000)
    if as_json:
        show_json(found)
        return
    series: dict[str, list[float | None]] = found["series"]
    unknown = sorted(set(names or ()) - set(series))
    if unknown and found["steps"]:
        raise ConfigError(f"no metric '{unknown[0]}' yet; 'penstock metrics {job}' lists those there are")
    columns = list(zip(found["steps"], *series.values(), strict=True))
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(["step", *series])
        writer.writerows(columns)
    elif plot:
        for name, values in series.items():
            typer.echo("\n".join(chart(name, found["steps"], values)))
    elif names:
        rows = [(step, *(number(value) for value in values)) for step, *values in columns[-last:]]
        console().print(table(("STEP#", *(f"{name}#" for name in series)), rows))
    else:
        rows = [(name, number(_newest(values)), sparkline(values)) for name, values in series.items()]
        console().print(table(("METRIC", "LAST#", "HISTORY"), rows))


def logs(
    job: Job,
    follow: Follow = False,
    service: Annotated[str | None, typer.Option(help="Only this service, like trainer or rollout-0.")] = None,
    tail: Annotated[int, typer.Option("--tail", "-n", min=1, max=10_000, help="Lines of each log to start with.")] = 50,
    as_json: Json = False,
) -> None:
    """Show the services' logs, from the coordinator's host."""
    with Client() as client:
        record = client.find(job)
        cursor: str | None = None
        while True:
            found = client.logs(record.id, service=service, tail=tail, after=cursor)
            for line in found["lines"]:
                if as_json:
                    show_line(line)
                else:
                    typer.echo(f"{line.get('worker') or line['service']}: {line['text']}")
            if not follow:
                return
            if client.get(record.id).status.phase in TERMINAL_PHASES and cursor is not None:
                return
            cursor = found["next"]
            time.sleep(_LOG_POLL_S)


def samples(
    job: Job,
    *,
    step: Annotated[int | None, typer.Option(min=0, help="Policy update; default: the newest.")] = None,
    sort: Annotated[str | None, typer.Option(help="reward, -reward, length or -length.")] = None,
    env: Annotated[str | None, typer.Option(help="Only of the source of that name.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100, help="Maximum number of rows.")] = 20,
    as_json: Json = False,
) -> None:
    """Show completions with their rewards."""
    with Client() as client:
        record = client.find(job)
        rows = client.samples(record.id, step=step, sort=sort, env=env, limit=limit)
        is_shown = record.spec.get("kind") == "embodied" and not as_json
        films = client.videos(record.id) if is_shown else []
        measured = (
            held_out_line(client.metrics(record.id, names=",".join(HELD_OUT), max_points=10_000)) if is_shown else ""
        )
    if as_json:
        show_json(rows)
        return
    shown = [
        (
            row.step,
            row.env,
            number(row.reward),
            number(row.advantage),
            _oneline(row.prompt),
            _oneline(row.completion),
            _oneline(row.answer),
        )
        for row in rows
    ]
    console().print(table(("STEP#", "ENV", "REWARD#", "ADVANTAGE#", "PROMPT", "COMPLETION", "ANSWER"), shown))
    if measured:
        note(measured)
    if films:
        note(f"{len(films)} videos of held-out episodes: penstock videos {record.name} --to DIR")


def held_out_line(found: dict[str, Any]) -> str:
    """Return one line with the newest held-out metrics in ``found``, the API's metrics reply; '' if it has no
    values."""
    for step, row in reversed([*zip(found["steps"], zip(*found["series"].values(), strict=True), strict=False)]):
        known = [(name, value) for name, value in zip(found["series"], row, strict=True) if value is not None]
        if known:
            values = ", ".join(f"{name} {number(value)}" for name, value in known)
            return f"held-out episodes at update {step}: {values}"
    return ""


def videos(
    job: Job,
    to: Annotated[Path | None, typer.Option("--to", help="Download them into this directory.")] = None,
    as_json: Json = False,
) -> None:
    """Show the videos of a job's held-out episodes, or download them."""
    with Client() as client:
        record = client.find(job)
        rows = client.videos(record.id)
        made = [row for row in rows if not row["error"]]
        for row in made if to is not None else []:
            assert to is not None
            client.download_video(record.id, row["name"], to / f"{record.name}-{row['name']}")
    if as_json:
        show_json(rows)
        return
    shown = [
        (row["version"], row["reset_id"], "yes" if row["success"] else "", number(row["reward"]), row["steps"],
         row["error"] or row["name"])
        for row in rows
    ]  # fmt: skip
    console().print(table(("VERSION#", "RESET ID#", "SOLVED", "RETURN#", "STEPS#", "VIDEO"), shown))
    if to is not None:
        note(f"{len(made)} videos are in {to}")


def workers(job: Job, as_json: Json = False) -> None:
    """Show the workers of a job, their policy versions, and what each waits for."""
    with Client() as client:
        rows = client.workers(client.find(job).id)
    if as_json:
        show_json(rows)
    else:
        console().print(workers_table(rows))


def workers_table(rows: Rows) -> Table:
    """Return a table of workers."""
    shown = [
        (
            row["worker"],
            "alive" if row.get("alive") else "lost",
            row.get("version"),
            row.get("running"),
            number(row.get("age_s")),
            row.get("waiting_for"),
        )
        for row in rows
    ]
    return table(("WORKER", "STATE", "VERSION#", "RUNNING#", "HEARD S AGO#", "WAITS FOR"), shown)


def why(job: Job, as_json: Json = False) -> None:
    """Show the current waits of a job: resource, holder and duration; and its health warnings."""
    with Client() as client:
        record = client.find(job)
        rows = client.why(record.id)
    if as_json:
        show_json(rows)
    elif rows:
        console().print(waits_table(rows))
    else:
        note("it waits for nothing")
    note_warnings(record)


def waits_table(rows: Rows) -> Table:
    """Return a table of the job's waits."""
    shown = [(r["waiting_for"], number(r["age_s"]), r.get("holder"), r.get("id"), r.get("subject")) for r in rows]
    return table(("WAITS FOR", "S#", "HELD BY", "ID", "SUBJECT"), shown)


def _newest(values: list[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _oneline(value: Any, width: int = 60) -> str:
    text = " ".join(str(value).split()) if value is not None else ""
    return text if len(text) <= width else text[: width - 1] + "…"
