"""Command that shows the audit log."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from penstock.cli.printing import Json, console, seconds_of, show_json, table
from penstock.client import Client
from penstock.client.results import AuditEntry

__all__ = ["audit_log"]


def audit_log(
    since: Annotated[str, typer.Option(help="Only entries up to this age, like 90m, 12h or 30d.")] = "1d",
    key: Annotated[str | None, typer.Option(help="Only requests with this key (id).")] = None,
    job: Annotated[str | None, typer.Option(help="Only requests about this job, and the one that created it.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=100_000, help="Maximum number of rows: the newest.")
    ] = 1000,
    as_json: Json = False,
) -> None:
    """Show requests that changed something, and their senders, the newest request last; needs the scope admin."""
    start = time.time() - (seconds_of(since) or 0.0)
    with Client() as client:
        of_job = client.find(job).id if job is not None else None
        rows = client.audit_log.list(since=start, key=key, job=of_job, limit=limit)[::-1]
    if as_json:
        show_json(rows)
        return
    columns = ("TIME", "KEY", "NAME", "FROM", "STATUS#", "REQUEST", "MADE")
    console().print(table(columns, [_row(row) for row in rows]))


def _row(row: AuditEntry) -> tuple[Any, ...]:
    clock = datetime.fromtimestamp(row.time, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    place = row.route
    for name, value in row.path.items():
        place = place.replace(f"{{{name}}}", value)
    query = "&".join(f"{name}={value}" for name, value in row.query.items())
    asked = f"{row.method} {place}" + (f"?{query}" if query else "") + (" (again)" if row.replayed else "")
    return clock, row.key, row.key_name, row.address, row.status, asked, row.location
