"""Command that serves a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.printing import Json, note, show_json
from penstock.client import Client
from penstock.shared.config.base import with_overrides
from penstock.shared.config.model import REFERENCE, parse_reference
from penstock.shared.errors import ConfigError, DeadlineError

__all__ = ["reference_of", "serve"]


def serve(
    model: Annotated[
        str, typer.Argument(help="Checkpoint: job:NAME@final, or in short NAME (the final one) or NAME@best; "
                                 "or a model directory.")
    ],
    *,
    name: Annotated[str | None, typer.Option("--name", help="Model for clients; default: NAME-final.")] = None,
    idle_s: Annotated[
        float | None, typer.Option("--idle", min=0.001, help="Stop after this many seconds without a request.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Like sampling.temperature=0.7.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until a worker has loaded the model.")] = 120,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Serve a checkpoint at the OpenAI-compatible API, under a name of its own, until this serving job is cancelled."""
    with Client() as client:
        path = model if Path(model).is_dir() else reference_of(model)
        spec: dict[str, Any] = {"kind": "serving", "name": name or _name_of(client, path), "model": {"path": path}}
        if idle_s is not None:
            spec["serving"] = {"idle_s": idle_s}
        record = client.submit(with_overrides(spec, overrides or []))
        try:
            record = client.wait(record.id, goal="running", timeout_s=timeout)
        except DeadlineError:
            raise DeadlineError(
                f"deployment '{record.id}' is not loaded within {timeout:g} s and goes on: see penstock why {record.id}"
            ) from None
    if record.status.phase == "failed":
        raise ConfigError(f"'{path}' cannot be served: {record.status.message}")
    if as_json:
        show_json(record)
        return
    typer.echo(record.id)
    note(f"'{record.name}' is served; talk to it with: penstock chat {record.name}; end it with: penstock cancel "
         f"{record.name}")  # fmt: skip


def reference_of(text: str) -> str:
    """Expand ``text`` to a full reference ``job:NAME@WHICH``; WHICH defaults to ``final``. Raises ConfigError."""
    reference = text if text.startswith(REFERENCE) else REFERENCE + text
    reference = reference if "@" in reference else f"{reference}@final"
    parse_reference(reference)
    return reference


def _name_of(client: Client, path: str) -> str:
    """Return the default name of a serving job: ``JOB-WHICH``, the name of the trained job and the choice of its
    checkpoint. Raises ConfigError for a directory."""
    if not path.startswith(REFERENCE):
        raise ConfigError("--name: give the model a name; of a checkpoint it would be that of its job")
    job, which = parse_reference(path)
    return f"{client.find(job).name[:50]}-{which.removeprefix('step:')}"
