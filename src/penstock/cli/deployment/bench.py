"""Commands that measure this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.cli.exits import FAILED, Commands
from penstock.cli.printing import Json, console, note, show_json, table
from penstock.local.ingest_rates import Front, kill_test, load_name, measure

__all__ = ["app"]

app = typer.Typer(name="bench", cls=Commands, help="Measure this machine.", no_args_is_help=True)


@app.command()
def ingest(
    *,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Seconds of each load.")] = 5.0,
    connections: Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight.")] = 64,
    batch: Annotated[int, typer.Option(min=1, max=256, help="Items in a batch.")] = 256,
    kills: Annotated[int, typer.Option(min=0, max=100, help="Number of kills of coordinator or NATS.")] = 2,
    as_json: Json = False,
) -> None:
    """Measure feedback items per second over HTTP, each on disk before its reply; exit with 1 if any item is lost."""
    note(f"load: {load_name()}, {connections} connections, {seconds:g} s each")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory, Front(Path(directory)) as front:
        results = {
            name: measure(front.plan(batch=size, connections=connections, seconds=seconds))
            for name, size in (("single", 0), (f"batches of {batch}", batch))
        }
        losses = kill_test(front, connections=connections, kills=kills) if kills else None
    if as_json:
        found = {name: msgspec.to_builtins(result) for name, result in results.items()}
        show_json({"load": load_name(), "rates": found, "kills": msgspec.to_builtins(losses)})
    else:
        rows = [
            (name, f"{r.items_per_s:,.0f}", f"{r.p50_ms:.1f}", f"{r.p99_ms:.1f}", r.errors)
            for name, r in results.items()
        ]
        console().print(table(("POSTS", "ITEMS/S#", "P50 MS#", "P99 MS#", "ERRORS#"), rows))
        if losses is not None:
            note(f"{losses.acked} acknowledged across {' and '.join(losses.kills)} killed: {losses.lost} lost")
    if losses is not None and (losses.lost or losses.repeated):
        raise typer.Exit(FAILED)
