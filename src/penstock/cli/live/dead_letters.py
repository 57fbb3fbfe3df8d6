"""Commands about dead letters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from penstock.cli.exits import Commands
from penstock.cli.printing import Job, Json, ago, console, note, show_done, show_json, table
from penstock.client import Client

__all__ = ["app"]

app = typer.Typer(
    name="dlq", cls=Commands, help="Dead letters: messages that could not be processed.", no_args_is_help=True
)

DeadLetterId = Annotated[int, typer.Argument(metavar="ID", min=1, help="Id, as 'penstock dlq ls' shows it.")]


@app.command()
def ls(
    job: Job,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number of rows.")] = 100,
    as_json: Json = False,
) -> None:
    """List the dead letters of a job, oldest first."""
    with Client() as client:
        rows = client.dead_letters.list(client.find(job).id, limit=limit)
    if as_json:
        show_json(rows)
        return
    shown = [
        (row.id, row.stream, row.draw, row.attempts, ago(datetime.fromtimestamp(row.time, UTC)), row.reason)
        for row in rows
    ]
    console().print(table(("ID#", "STREAM", "DRAW", "ATTEMPTS#", "AGE#", "REASON"), shown))


@app.command()
def show(job: Job, dead_letter: DeadLetterId) -> None:
    """Show a dead letter with its headers and content, as JSON."""
    with Client() as client:
        show_json(client.dead_letters.show(client.find(job).id, dead_letter))


@app.command()
def replay(job: Job, dead_letter: DeadLetterId, as_json: Json = False) -> None:
    """Retry a dead letter, then delete it: draw its prompt again, or store its interactions or feedback items again."""
    with Client() as client:
        result = client.dead_letters.replay(client.find(job).id, dead_letter)
    if as_json:
        show_json(result)
    elif result.stored is not None:
        kind = "interactions" if result.stream == "INTERACTIONS" else "items of feedback"
        note(f"{result.stored} {kind} of dead letter {dead_letter} stored again; what is known already was left out")
    else:
        note(
            f"dead letter {dead_letter} is asked for again"
            + (f" as draw {result.draw}" if result.draw is not None else "")
        )


@app.command()
def drop(job: Job, dead_letter: DeadLetterId, as_json: Json = False) -> None:
    """Delete a dead letter."""
    with Client() as client:
        client.dead_letters.drop(client.find(job).id, dead_letter)
    show_done(f"dead letter {dead_letter} is dropped", {"id": dead_letter, "dropped": True}, as_json)
