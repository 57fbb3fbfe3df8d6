"""Commands about API keys."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.exits import Commands
from penstock.cli.printing import Json, ago, console, note, seconds_of, show_done, show_json, table
from penstock.client import Client
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.keys import SCOPES

__all__ = ["app"]

app = typer.Typer(name="keys", cls=Commands, help="Make, list and revoke API keys.", no_args_is_help=True)


@app.command()
def create(
    *,
    name: Annotated[str, typer.Argument(help="Description.")],
    scopes: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(SCOPES)}.")],
    expires: Annotated[str | None, typer.Option(help="Lifetime, like 12h or 30d; default: unlimited.")] = None,
    rate: Annotated[str | None, typer.Option(help="Rate limit of the key, like 600/minute.")] = None,
    models: Annotated[
        str | None, typer.Option(help="Comma-separated names or ids of jobs; the key reaches no others.")
    ] = None,
    max_weight: Annotated[
        float | None, typer.Option(min=0, max=1, help="Maximum weight of its feedback; default: 1.")
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(help="With jobs:code: comma-separated modules whose functions its jobs may name; *: all."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it; it is not shown again."""
    wanted = [scope.strip() for scope in scopes.split(",") if scope.strip()]
    unknown = sorted(set(wanted) - set(SCOPES))
    if unknown or not wanted:
        raise ConfigError(f"'{', '.join(unknown)}' is no scope; there are: {', '.join(SCOPES)}")
    with Client() as client:
        made = client.keys.create(
            name, wanted, expires_in_s=seconds_of(expires), rate_limit=rate, max_weight=max_weight,
            models=None if models is None else [model.strip() for model in models.split(",")],
            code_modules=None if code is None else [module.strip() for module in code.split(",") if module.strip()],
        )  # fmt: skip
    if as_json:
        show_json(made)
    else:
        typer.echo(made.key)
        note(f"key {made.id} '{name}' may: {', '.join(made.scopes)}; keep it, it is not shown again")
        for text in made.warnings:
            note(f"warning: {text}")


@app.command()
def ls(as_json: Json = False) -> None:
    """List the keys, never their texts."""
    with Client() as client:
        rows = client.keys.list()
    if as_json:
        show_json(rows)
        return
    shown = [
        (
            row.id,
            row.name,
            ", ".join(row.scopes),
            ago(row.created_at),
            "never" if row.expires_at is None else row.expires_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            row.rate_limit,
            ", ".join(row.models) if row.models else "all",
        )
        for row in rows
    ]
    console().print(table(("ID", "NAME", "MAY", "AGE#", "EXPIRES", "RATE", "MODELS"), shown))


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id, as 'penstock keys ls' shows it.")], as_json: Json = False
) -> None:
    """Revoke a key."""
    with Client() as client:
        client.keys.revoke(id)
    show_done(f"key {id} is revoked", {"id": id, "revoked": True}, as_json)
