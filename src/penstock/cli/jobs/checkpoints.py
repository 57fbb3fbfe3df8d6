"""Commands about checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from penstock.cli.exits import Commands
from penstock.cli.printing import Job, Json, ago, console, note, number, show_done, show_json, table
from penstock.client import Client
from penstock.client.calls import Rows
from penstock.shared.errors import NotFound

__all__ = ["app", "checkpoint_table"]

app = typer.Typer(name="ckpt", cls=Commands, help="Checkpoints: list, download, go back.", no_args_is_help=True)

FLAGS = ("initial", "best", "newest", "final")


@app.command()
def ls(job: Job, as_json: Json = False) -> None:
    """List the checkpoints of a job."""
    with Client() as client:
        rows = client.checkpoints(client.find(job).id)
    if as_json:
        show_json(rows)
    else:
        console().print(checkpoint_table(rows))


def checkpoint_table(rows: Rows) -> Table:
    """Return a table of checkpoints."""
    shown = [
        (
            row["number"],
            row["version"],
            ", ".join(flag for flag in FLAGS if row[flag]),
            f"{row['nbytes'] / 1e6:,.1f}" if row["available"] else "gone",
            ago(datetime.fromtimestamp(row["time"], UTC)),
            row["reason"],
            row["path"],
        )
        for row in rows
    ]
    return table(("NUMBER#", "VERSION#", "IS", "MB#", "AGE#", "TAKEN FOR", "PATH"), shown)


@app.command()
def get(
    job: Job,
    which: Annotated[str, typer.Argument(metavar="[WHICH]", help="Number, initial, best, newest, final.")] = "newest",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory; default: ./NAME-NUMBER.")] = None,
    names: Annotated[list[str] | None, typer.Option("--file", help="Only this file; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Download a checkpoint and verify it; an interrupted download is resumed."""
    with Client() as client:
        record = client.find(job)
        row = choose(client.checkpoints(record.id), which)
        directory = out or Path(f"{record.name}-{row['number']}")
        client.download_checkpoint(record.id, row["number"], directory, names=names)
    if as_json:
        show_json({**row, "directory": str(directory)})
    else:
        note(f"checkpoint {row['number']} of {record.id}: {number(row['nbytes'])} bytes, every file verified")
        typer.echo(str(directory))


@app.command()
def save(
    job: Job,
    timeout: Annotated[float, typer.Option(min=0, help="Give up after this many seconds.")] = 120,
    as_json: Json = False,
) -> None:
    """Take a checkpoint of the current weights, and wait for it."""
    with Client() as client:
        made = client.checkpoint_now(client.find(job).id, timeout_s=timeout)
    if as_json:
        show_json(made)
    else:
        note(f"checkpoint {made['number']} is there")
        typer.echo(made["path"])


@app.command()
def rm(
    job: Job,
    which: Annotated[str, typer.Argument(metavar="WHICH", help="Number, initial, best, newest, final.")],
    as_json: Json = False,
) -> None:
    """Delete the files of a checkpoint. Not possible for the initial, best and newest checkpoint of a running job."""
    with Client() as client:
        record = client.find(job)
        row = choose(client.checkpoints(record.id), which)
        client.delete_checkpoint(record.id, row["number"])
    show_done(f"checkpoint {row['number']} of {record.id} is deleted", {**row, "available": False}, as_json)


@app.command()
def promote(
    job: Job,
    version: Annotated[int | None, typer.Argument(metavar="[VERSION]", min=0, help="Default: the newest.")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Give up after this many seconds.")] = 120,
    as_json: Json = False,
) -> None:
    """Serve the newest version regardless of its evaluation; needs the scope admin."""
    with Client() as client:
        record = client.find(job)
        wanted = record.status.policy_version if version is None else version
        made = client.versions.promote(record.id, wanted, timeout_s=timeout)
    show_done(f"version {wanted} of {record.id} is served", {**made, "version": wanted}, as_json)


@app.command()
def rollback(
    job: Job,
    which: Annotated[str, typer.Argument(metavar="WHICH", help="Number, initial, best, newest, final.")],
    timeout: Annotated[float, typer.Option(min=0, help="Give up after this many seconds.")] = 120,
    as_json: Json = False,
) -> None:
    """Discard the updates after a checkpoint and continue training from it."""
    with Client() as client:
        record = client.find(job)
        row = choose(client.checkpoints(record.id), which)
        made = client.versions.roll_back(record.id, row["number"], timeout_s=timeout)
    text = f"{record.id} goes on from checkpoint {row['number']} as version {made['version']}"
    show_done(text, {**made, "checkpoint": row["number"]}, as_json)


def choose(rows: list[dict[str, Any]], which: str) -> dict[str, Any]:
    """Return the row of the checkpoint whose number or flag (like `best`) is ``which``. Raises NotFound."""
    for row in rows:
        if which == str(row["number"]) or (which in FLAGS and row[which]):
            return row
    known = ", ".join(str(row["number"]) for row in rows) or "none"
    if which == "best" and rows:
        raise NotFound(
            "no checkpoint 'best': the job file names no metric to keep it by (checkpoint.keep_best: "
            f"{{metric: eval/greedy}}), or nothing was measured; there are: {known} (or initial, newest, final)"
        )
    raise NotFound(f"no checkpoint '{which}'; there are: {known} (or initial, best, newest, final)")
