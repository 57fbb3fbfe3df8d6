"""Command that shows a job on one screen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import yaml
from rich.console import RenderableType

from penstock.cli.jobs.checkpoints import checkpoint_table
from penstock.cli.jobs.commands import state_table
from penstock.cli.jobs.views import waits_table, workers_table
from penstock.cli.printing import Job, Json, console, event_line, number, show_json, table
from penstock.client import Client
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord

__all__ = ["describe"]

_CHECKPOINTS = 5


def describe(
    job: Job,
    last: Annotated[int, typer.Option("--events", "-n", min=0, max=1000, help="Number of newest events.")] = 10,
    as_json: Json = False,
) -> None:
    """Show a job on one screen: job file, state, conditions, workers, waits, feedback, checkpoints, newest events."""
    with Client() as client:
        found = _describe(client, client.find(job), last)
    if as_json:
        show_json(found)
        return
    screen = console()
    for title, part in _parts(found):
        screen.print(f"{title}:", style="bold")
        screen.print(part, soft_wrap=isinstance(part, str))
        screen.print()


def _describe(client: Client, record: JobRecord, last: int) -> dict[str, Any]:
    """Return the data to show. An ended job has no workers and waits; only an online job has feedback counts."""
    over = record.status.phase in TERMINAL_PHASES
    live = record.spec.get("kind") == "online_rl"
    return {
        "job": record,
        "workers": [] if over else client.workers(record.id),
        "waits": [] if over else client.why(record.id),
        "feedback": client.funnel(record.id).by_status if live else None,
        "checkpoints": client.checkpoints(record.id),
        "events": list(deque(client.events(record.id, follow=False), maxlen=last)),
    }


def _parts(found: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    record: JobRecord = found["job"]
    yield "Job file", yaml.safe_dump(record.spec, sort_keys=False, allow_unicode=True).rstrip()
    yield "State", state_table(record)
    if record.status.phase not in TERMINAL_PHASES:
        yield "Workers", workers_table(found["workers"]) if found["workers"] else "none"
        yield "Waits", waits_table(found["waits"]) if found["waits"] else "for nothing"
    if found["feedback"] is not None:
        items = [(status, number(count)) for status, count in found["feedback"].items()]
        yield "Feedback", table(("STATUS", "ITEMS#"), items) if items else "none"
    rows = found["checkpoints"]
    more = f", the newest {_CHECKPOINTS} of {len(rows)}" if len(rows) > _CHECKPOINTS else ""
    yield f"Checkpoints{more}", checkpoint_table(rows[-_CHECKPOINTS:]) if rows else "none"
    events = [event_line(row) for row in found["events"]]
    yield "Events", type(events[0])("\n").join(events) if events else "none"
