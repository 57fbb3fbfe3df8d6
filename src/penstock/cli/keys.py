"""Commands about API keys."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

import typer

from penstock.cli.exits import Commands
from penstock.cli.printing import Json, ago, console, note, show_json, table
from penstock.client import Client
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.keys import SCOPES

__all__ = ["app"]

app = typer.Typer(name="keys", cls=Commands, help="Make, list and revoke API keys.", no_args_is_help=True)

_AGE = re.compile(r"(\d{1,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="For people.")],
    scopes: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(SCOPES)}.")],
    expires: Annotated[str | None, typer.Option(help="Age at which it ends, like 12h or 30d; default: never.")] = None,
    rate: Annotated[str | None, typer.Option(help="Its own rate limit, like 600/minute.")] = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it; it is shown this once."""
    wanted = [scope.strip() for scope in scopes.split(",") if scope.strip()]
    unknown = sorted(set(wanted) - set(SCOPES))
    if unknown or not wanted:
        raise ConfigError(f"'{', '.join(unknown)}' is no scope; there are: {', '.join(SCOPES)}")
    with Client() as client:
        made = client.keys.create(name, wanted, expires_in_s=_seconds(expires), rate_limit=rate)
    if as_json:
        show_json(made)
    else:
        typer.echo(made["key"])
        note(f"key {made['id']} '{name}' may: {', '.join(made['scopes'])}; keep it, it is not shown again")


@app.command()
def ls(as_json: Json = False) -> None:
    """List the keys; never their text."""
    with Client() as client:
        rows = client.keys.list()
    if as_json:
        show_json(rows)
        return
    shown = [
        (
            row["id"],
            row["name"],
            ", ".join(row["scopes"]),
            ago(datetime.fromisoformat(row["created_at"])),
            row["expires_at"] or "never",
            row["rate_limit"],
        )
        for row in rows
    ]
    console().print(table(("ID", "NAME", "MAY", "AGE#", "EXPIRES", "RATE"), shown))


@app.command()
def revoke(id: Annotated[str, typer.Argument(metavar="ID", help="As 'penstock keys ls' shows it.")]) -> None:
    """End a key."""
    with Client() as client:
        client.keys.revoke(id)
    note(f"key {id} is revoked")


def _seconds(age: str | None) -> float | None:
    if age is None:
        return None
    found = _AGE.fullmatch(age)
    if found is None:
        raise ConfigError(f"'{age}' is no age; write it like 90m, 12h or 30d")
    return float(int(found[1]) * _UNIT_S[found[2]])
