"""Commands about quarantined feedback."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from penstock.cli.exits import Commands
from penstock.cli.printing import Json, ago, console, show_done, show_json, table
from penstock.client import Client

__all__ = ["app"]

app = typer.Typer(
    name="quarantine", cls=Commands, help="Quarantined feedback: list, show, release, drop.", no_args_is_help=True
)  # fmt: skip

Item = Annotated[
    list[str],
    typer.Argument(metavar="[JOB] ID", help="Id, as 'penstock quarantine ls' shows it; its job may precede it."),
]


@app.command()
def ls(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Default: all jobs.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number of rows.")] = 100,
    as_json: Json = False,
) -> None:
    """List the quarantined feedback of one job, or of all jobs."""
    with Client() as client:
        rows = client.quarantine.list(client.find(job).id if job is not None else None, limit=limit)
    if as_json:
        show_json(rows)
        return
    shown = [
        (
            row.feedback_id,
            row.job,
            row.metric,
            row.source,
            ago(datetime.fromtimestamp(row.received, UTC)),
            row.reason,
        )
        for row in rows
    ]
    console().print(table(("ID", "JOB", "METRIC", "SOURCE", "AGE#", "REASON"), shown))


@app.command()
def show(item: Item) -> None:
    """Show a quarantined item and its content, as JSON."""
    with Client() as client:
        show_json(client.quarantine.show(*_place(client, item)))


@app.command()
def release(item: Item, as_json: Json = False) -> None:
    """Release a quarantined feedback item, which then counts as if it arrived now."""
    with Client() as client:
        verdict = client.quarantine.release(*_place(client, item))
    show_done(f"feedback {item[-1]} is released", verdict, as_json)


@app.command()
def drop(item: Item, as_json: Json = False) -> None:
    """Reject a quarantined feedback item permanently."""
    with Client() as client:
        verdict = client.quarantine.drop(*_place(client, item))
    show_done(f"feedback {item[-1]} is dropped", verdict, as_json)


def _place(client: Client, words: list[str]) -> list[str]:
    """Return ``[item id]`` if ``words`` has only an item, or ``[job id, item id]`` if it has a job and an item."""
    if len(words) > 2:
        raise typer.BadParameter(f"expected the id of an item, or a job and the id, got {len(words)} words")
    return [*(client.find(job).id for job in words[:-1]), words[-1]]
