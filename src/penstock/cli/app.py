"""The ``penstock`` application: registration of all commands."""

from __future__ import annotations

from typing import Annotated

import typer

import penstock
from penstock.cli.demo import command
from penstock.cli.deployment import (
    audit_log,
    backups,
    bench,
    doctor,
    engines,
    files,
    keys,
    machine,
    record,
    sims,
    webhooks,
)
from penstock.cli.exits import Commands
from penstock.cli.jobs import audit, checkpoints, commands, describe, export, serving, sweep, views, watching
from penstock.cli.live import chat, dead_letters, feedback, quarantine, users

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="On-policy reinforcement learning as services. Start with: penstock demo",
    epilog="PENSTOCK_URL (default http://127.0.0.1:8000) and PENSTOCK_API_KEY (default: the key of your own "
    "'penstock up') say which API to use. "
    "Exit codes: 0 ok, 1 failed, 2 usage or a bad job file, 3 cancelled, 4 unreachable.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    """On-policy reinforcement learning as services. Start with: penstock demo"""


for _command in (
    command.demo,
    machine.up,
    machine.down,
    backups.backup,
    backups.restore,
    doctor.doctor,
    commands.submit,
    sweep.sweep,
    commands.amend,
    commands.extend,
    commands.clone,
    commands.ls,
    commands.get,
    describe.describe,
    commands.wait,
    commands.cancel,
    commands.rm,
    commands.pause,
    commands.resume,
    commands.scale,
    serving.serve,
    export.export,
    chat.chat,
    watching.top,
    views.events,
    views.metrics,
    views.logs,
    views.samples,
    views.videos,
    views.workers,
    views.why,
    audit.audit,
    audit.replay,
    audit_log.audit_log,
    files.grade,
):
    app.command()(_command)
app.command(name="record")(record.record_demonstrations)
app.add_typer(checkpoints.app)
app.add_typer(keys.app)
app.add_typer(feedback.app)
app.add_typer(bench.app)
app.add_typer(dead_letters.app)
app.add_typer(files.app)
app.add_typer(webhooks.app)
app.add_typer(quarantine.app)
app.add_typer(users.app)
app.add_typer(sims.app)
app.add_typer(engines.app)


def main() -> None:
    """Run the ``penstock`` command."""
    app()
