"""Commands about uploaded data sets and graders."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from penstock.cli.exits import FAILED, Commands
from penstock.cli.printing import Json, ago, console, note, show_done, show_json, table
from penstock.client import Client
from penstock.client.beside import with_sources
from penstock.shared.config.base import load_yaml
from penstock.shared.errors import ConfigError

__all__ = ["app", "grade"]

app = typer.Typer(name="files", cls=Commands, help="Uploaded data sets: upload, list, delete.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="Id, as 'penstock files ls' shows it.")]


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines: one row per line.")], as_json: Json = False
) -> None:
    """Upload a data set to the server, and print its id."""
    with Client() as client:
        row = client.files.upload(path)
    if as_json:
        show_json(row)
    else:
        typer.echo(row.id)
        note(f"{row.rows} rows, sha256 {row.sha256}")


@app.command()
def ls(as_json: Json = False) -> None:
    """List the data sets, newest first."""
    with Client() as client:
        rows = client.files.list()
    if as_json:
        show_json(rows)
        return
    shown = [
        (row.id, row.filename, row.rows, row.bytes, ago(datetime.fromtimestamp(row.created_at, UTC))) for row in rows
    ]
    console().print(table(("ID", "NAME", "ROWS#", "BYTES#", "AGE#"), shown))


@app.command()
def rm(id: Id, as_json: Json = False) -> None:
    """Delete a data set that no job reads."""
    with Client() as client:
        client.files.delete(id)
    show_done(f"{id} is gone", {"id": id, "deleted": True}, as_json)


def grade(
    grader: Annotated[Path, typer.Argument(metavar="FILE", help="A grader in OpenAI's format, YAML or JSON.")],
    sample: Annotated[str, typer.Option(help="Answer of a model.")],
    item: Annotated[str, typer.Option(help="The data row, as JSON.")] = "{}",
    as_json: Json = False,
) -> None:
    """Try a grader on one answer, in a reward worker; exit 1 if it fails."""
    with Client() as client:
        found = client.graders.run(with_sources(load_yaml(grader), grader.parent), sample, _row(item))
    errors = found.metadata.failures
    if as_json:
        show_json(found)
    elif errors:
        note("\n".join(f"{name}: {value}" for name, value in errors.items()))
    else:
        typer.echo(f"{found.reward:g}")
        for name, score in found.sub_rewards.items():
            note(f"{name}: {score:g}")
    if errors:
        raise typer.Exit(FAILED)


def _row(text: str) -> dict[str, Any]:
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--item is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError("--item must be a JSON object")
    return row
