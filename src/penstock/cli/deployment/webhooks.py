"""Commands about webhooks."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.exits import FAILED, OK, Commands
from penstock.cli.printing import Json, ago, console, note, show_done, show_json, table
from penstock.client import Client

__all__ = ["app"]

app = typer.Typer(
    name="webhooks", cls=Commands, help="Post events of jobs to an address, signed.", no_args_is_help=True
)

Id = Annotated[str, typer.Argument(metavar="ID", help="Id, as 'penstock webhooks ls' shows it.")]


@app.command()
def create(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address that receives the events.")],
    types: Annotated[
        str | None, typer.Option(help="Comma-separated, like 'rl.job.*,rl.checkpoint.*'; default: jobs that ended.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Only events of this job: id, prefix or name.")] = None,
    description: Annotated[str, typer.Option(help="Description.")] = "",
    as_json: Json = False,
) -> None:
    """Create a webhook and print the secret that signs its deliveries; the secret is not shown again."""
    wanted = None if types is None else [one.strip() for one in types.split(",") if one.strip()]
    with Client() as client:
        of = None if job is None else client.find(job).id
        made = client.webhooks.create(url, types=wanted, job=of, description=description)
    if as_json:
        show_json(made)
    else:
        typer.echo(made.secret)
        note(f"webhook {made.id} gets {', '.join(made.types)}; keep the secret, it is not shown again")


@app.command()
def ls(as_json: Json = False) -> None:
    """List the webhooks."""
    with Client() as client:
        rows = client.webhooks.list()
    if as_json:
        show_json(rows)
        return
    shown = [
        (
            row.id,
            row.url,
            ", ".join(row.types),
            ago(row.created_at),
            "on" if row.enabled else f"off: {row.disabled_reason or 'by request'}",
        )
        for row in rows
    ]
    console().print(table(("ID", "URL", "TYPES", "AGE#", "STATE"), shown))


@app.command()
def show(id: Id) -> None:
    """Show a webhook and the progress of its deliveries, as JSON."""
    with Client() as client:
        show_json(client.webhooks.show(id))


@app.command()
def test(id: Id, as_json: Json = False) -> None:
    """Post a test event now."""
    with Client() as client:
        found = client.webhooks.test(id)
    show_done("taken" if found.delivered else f"not taken: {found.error}", found, as_json)
    raise typer.Exit(OK if found.delivered else FAILED)


@app.command()
def enable(id: Id, as_json: Json = False) -> None:
    """Resume deliveries where they stopped."""
    with Client() as client:
        changed = client.webhooks.change(id, enabled=True)
    show_done(f"webhook {id} is on", changed, as_json)


@app.command()
def disable(id: Id, as_json: Json = False) -> None:
    """Pause deliveries until the webhook is enabled again; events are kept."""
    with Client() as client:
        changed = client.webhooks.change(id, enabled=False)
    show_done(f"webhook {id} is off", changed, as_json)


@app.command()
def rm(id: Id, as_json: Json = False) -> None:
    """Delete a webhook."""
    with Client() as client:
        client.webhooks.delete(id)
    show_done(f"webhook {id} is gone", {"id": id, "deleted": True}, as_json)
