"""Commands about users' data."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.exits import Commands
from penstock.cli.printing import Json, console, number, show_json, table
from penstock.client import Client
from penstock.client.results import Erasure

__all__ = ["app"]

app = typer.Typer(
    name="users", cls=Commands, help="Users' data: consent, deletion. Needs feedback:admin.", no_args_is_help=True
)

User = Annotated[str, typer.Argument(metavar="USER", help="Name of the user in requests and feedback.")]


@app.command()
def consent(
    user: User,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Allow or forbid training on the user's interactions.")
    ],
    as_json: Json = False,
) -> None:
    """Set whether a user's interactions may be trained on, from now on."""
    with Client() as client:
        said = client.users.consent(user, train=train)
    if as_json:
        show_json(said)
    else:
        typer.echo(f"{said.user} {'may' if said.train else 'may not'} be trained on")


@app.command()
def erase(
    user: User,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait until it is done.")] = 120,
    as_json: Json = False,
) -> None:
    """Delete the stored data of a user, and list the policy versions that were trained on it. The versions stay."""
    with Client() as client:
        _show(client.users.erase(user, timeout_s=timeout_s), as_json)


@app.command()
def status(user: User, as_json: Json = False) -> None:
    """Show the progress of the deletion of a user's data."""
    with Client() as client:
        _show(client.users.erasure(user), as_json)


def _show(report: Erasure, as_json: bool) -> None:
    if as_json:
        show_json(report)
        return
    trained = (f"{job}: {', '.join(map(str, versions))}" for job, versions in report.trained_versions.items())
    rows = [
        ("deletion", report.status),
        ("interactions", number(report.interactions)),
        ("feedback", number(report.feedback)),
        ("trajectories", number(report.groups)),
        ("episodes", number(report.episodes)),
        ("trained versions", "; ".join(trained) or "none"),
    ]
    console().print(table(("FIELD", "VALUE"), rows))
