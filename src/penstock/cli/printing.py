"""Output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import orjson
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.shared.errors import ConfigError
from penstock.shared.protocol.jobs import JobRecord

__all__ = [
    "Job",
    "Json",
    "ago",
    "console",
    "duration",
    "event_line",
    "note",
    "note_warnings",
    "number",
    "seconds_of",
    "show_done",
    "show_json",
    "show_line",
    "sparkline",
    "table",
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Id, unique start of an id, or name (the newest).")]

_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {"error": "red", "warning": "yellow"}
_PIPE_WIDTH = 200
_AGE = re.compile(r"(\d{1,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output or standard error. If the stream is not a terminal, the console is wide, so
    that no text is cut."""
    plain = Console(highlight=False, emoji=False, markup=False, stderr=stderr)
    if plain.is_terminal:
        return plain
    return Console(highlight=False, emoji=False, markup=False, stderr=stderr, width=_PIPE_WIDTH)


def note(text: str) -> None:
    """Print a remark on stderr, apart from the result."""
    typer.echo(text, err=True)


def note_warnings(record: JobRecord) -> None:
    """Print the active health warnings of a job, one per line, on stderr."""
    for warning in record.status.warnings:
        note(f"warning: {warning.kind}: {warning.message}")


def show_json(value: Any) -> None:
    """Print one indented JSON document."""
    typer.echo(orjson.dumps(_plain(value), option=orjson.OPT_INDENT_2).decode())


def show_line(value: Any) -> None:
    """Print one JSON object on one line."""
    typer.echo(orjson.dumps(_plain(value)).decode())


def show_done(text: str, value: Any, as_json: bool) -> None:
    """Print the result of a command: if ``as_json``, ``value`` as JSON, otherwise ``text`` as a remark on stderr."""
    if as_json:
        show_json(value)
    else:
        note(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a plain table; columns whose names end in ``#`` are right-aligned."""
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        found.add_column(name.rstrip("#"), justify="right" if name.endswith("#") else "left", overflow="fold")
    for row in rows:
        found.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return found


def event_line(row: dict[str, Any]) -> Text:
    """Return one event as a line of text."""
    clock = datetime.fromtimestamp(float(row.get("time", 0)), UTC).astimezone().strftime("%H:%M:%S")
    level = str(row.get("level", "info"))
    text = Text(f"{clock} {row.get('type', ''):<12} ")
    return text.append(str(row.get("message", "")), _STYLES.get(level, ""))


def number(value: Any) -> str:
    """Format a whole number in full, and any other number with four significant digits; '' for None."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{int(value):,}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"


def ago(moment: datetime | None) -> str:
    """Format the age of ``moment``, like ``3m``; '' for None."""
    return duration(max(0.0, time.time() - moment.timestamp())) if moment is not None else ""


def duration(seconds: float) -> str:
    """Format a duration in the largest unit that fits, like ``3m``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def seconds_of(age: str | None) -> float | None:
    """Convert an age like ``90m`` to seconds. Raises ConfigError."""
    if age is None:
        return None
    found = _AGE.fullmatch(age)
    if found is None:
        raise ConfigError(f"'{age}' is no age; write it like 90m, 12h or 30d")
    return float(int(found[1]) * _UNIT_S[found[2]])


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """Return the values as a line of blocks, averaged down to ``width`` and scaled to their own range."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    count = min(width, len(known))
    edges = [round(i * len(known) / count) for i in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _plain(value: Any) -> Any:
    """Convert results of the client to JSON values."""
    return msgspec.to_builtins(value, enc_hook=_dumped)


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON")
