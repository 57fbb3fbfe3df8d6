"""Exit codes, and the display of errors as one line."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.shared.errors import ConfigError, DataError, PenstockError, Unavailable
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["CANCELLED", "FAILED", "INTERRUPTED", "OK", "UNREACHABLE", "USAGE", "Commands", "code_of", "result_code"]

OK, FAILED, USAGE, CANCELLED, UNREACHABLE = 0, 1, 2, 3, 4
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


def code_of(error: PenstockError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, Unavailable):
        return UNREACHABLE
    return USAGE if isinstance(error, ConfigError | DataError) else FAILED


def result_code(record: JobRecord) -> int:
    """Return the exit code for the result of a job; 0 if the job still runs."""
    return {"failed": FAILED, "cancelled": CANCELLED}.get(record.status.phase, OK)


class Commands(TyperGroup):
    """Command group that prints an error as one line and exits with its code; PENSTOCK_DEBUG=1 shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            if os.environ.get("PENSTOCK_DEBUG"):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(code_of(error)) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `penstock events -f | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(OK) from None
        except OSError as error:
            if error.filename is None or os.environ.get("PENSTOCK_DEBUG"):
                raise
            typer.echo(f"error: cannot use {os.fsdecode(error.filename)}: {error.strerror}", err=True)
            raise typer.Exit(FAILED) from None
