"""Commands that back up and restore a whole deployment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.deployment.machine import DataDir
from penstock.cli.printing import Json, note, show_done
from penstock.local import read_state
from penstock.local.backup import load_backup, restore_files, restore_streams, take_backup
from penstock.local.state import Claim
from penstock.shared.config.service import load_settings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.permissions import OPERATOR
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer

__all__ = ["backup", "restore"]

ROOM = 1 << 30
"""Disk space that a temporary NATS server needs in addition to the sizes of its streams (bytes)."""
FolderOf = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the backup.")]
NatsUrl = Annotated[
    str | None, typer.Option("--nats-url", help="URL of the bus, unless 'penstock up' runs it on this machine.")
]


def backup(target: FolderOf, data_dir: DataDir = None, nats_url: NatsUrl = None, as_json: Json = False) -> None:
    """Back up the deployment to a new directory, while jobs run: ledgers, streams, checkpoints, keys, data files."""
    directory = _directory(data_dir)
    nats_url = nats_url or os.environ.get("PENSTOCK_NATS_URL")

    async def run() -> None:
        async with _source(directory, nats_url) as bus:
            made = await take_backup(bus, directory, target.expanduser().resolve(), note)
        text = f"{target}: {len(made.jobs)} jobs, {len(made.files)} files, {made.nbytes} bytes"
        facts = {"path": str(target), "jobs": len(made.jobs), "files": len(made.files), "bytes": made.nbytes}
        show_done(text, facts, as_json)

    asyncio.run(run())


def restore(source: FolderOf, data_dir: DataDir = None, nats_url: NatsUrl = None, as_json: Json = False) -> None:
    """Restore a backup into an empty data directory. Start the deployment afterwards with 'penstock up'."""
    directory, source = _directory(data_dir), source.expanduser().resolve()

    async def run() -> None:
        note("verifying the backup")
        manifest = await asyncio.to_thread(load_backup, source)
        size = sum(int(stream.image.config["max_bytes"]) for stream in manifest.streams) + ROOM
        with Claim(directory):
            async with _empty(directory, nats_url, size) as bus:
                await asyncio.to_thread(restore_files, source, manifest, directory)
                notes = await restore_streams(bus, source, manifest, directory, note)
        for text in notes:
            note(f"warning: {text}")
        done = f"{len(manifest.jobs)} jobs are in {directory}; start them with: penstock up --data-dir {directory}"
        show_done(done, {"data_dir": str(directory), "jobs": len(manifest.jobs), "warnings": notes}, as_json)

    asyncio.run(run())


def _directory(data_dir: Path | None) -> Path:
    return (data_dir or load_settings().data_dir).expanduser().resolve()


@asynccontextmanager
async def _source(directory: Path, nats_url: str | None) -> AsyncIterator[Bus]:
    """Connect to the bus to back up: the bus at ``nats_url``, or else the bus of the deployment that runs in
    ``directory``.

    If neither exists, start a temporary server on the store in ``directory``. Raises ConfigError without a store.
    """
    running = read_state(directory)
    with contextlib.ExitStack() as stack:
        url = nats_url or (running.nats_url if running is not None else None)
        if url is None:
            if not (directory / "nats").is_dir():
                raise ConfigError(f"nothing runs in {directory}, and it holds no store; name another with --data-dir")
            stack.enter_context(Claim(directory))
            url = stack.enter_context(_server(directory)).url_of(OPERATOR)
        async with await Bus.connect(url, name="penstock backup") as bus:
            yield bus


@asynccontextmanager
async def _empty(directory: Path, nats_url: str | None, size: int) -> AsyncIterator[Bus]:
    """Connect to an empty bus for a restore: the bus at ``nats_url``, or else a temporary server with its store in
    ``directory``.

    Raises ConfigError if the bus has streams, or the directory holds a store, already.
    """
    with contextlib.ExitStack() as stack:
        if nats_url is None:
            if (directory / "nats").exists():
                raise ConfigError(f"{directory} holds a store already; restore into an empty one with --data-dir")
            nats_url = stack.enter_context(_server(directory, size)).url_of(OPERATOR)
        async with await Bus.connect(nats_url, name="penstock restore") as bus:
            if found := await bus.streams():
                raise ConfigError(f"the bus has streams already ({', '.join(found[:3])}, …); restore into an empty one")
            yield bus


def _server(directory: Path, size: int | None = None) -> NatsServer:
    """Return a temporary server with a random password, which only this process knows."""
    return NatsServer(directory / "nats", max_file_store=size, passwords={OPERATOR: secrets.token_urlsafe(32)})
