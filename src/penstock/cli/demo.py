"""``penstock demo``: everything on this machine, one small job, from start to end."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import penstock
from penstock.cli.books import equation
from penstock.cli.exits import INTERRUPTED, result_code
from penstock.cli.jobs import Overrides, load_job
from penstock.cli.machine import DataDir, ready_with_progress
from penstock.cli.online import load_online_job, run_online, summary
from penstock.cli.printing import console, note
from penstock.cli.view import REWARD, View
from penstock.cli.watching import watch
from penstock.client import AsyncClient
from penstock.local import Stack, StackOptions
from penstock.shared.config.kinds import AnyJob
from penstock.shared.errors import ConfigError

__all__ = ["demo", "demo_options", "example"]

DEMO, ONLINE_DEMO = "addition.yaml", "online.yaml"
RATE = {"PENSTOCK_RATE_LIMIT": "1000000/minute"}
"""One agent stands for many users."""
_ENDS = 5
"""Updates that are averaged at the start and at the end of the run."""


class Show(StrEnum):
    """What the demo shows."""

    ADDITION = "addition"
    ONLINE = "online"


def demo(
    show: Annotated[
        Show, typer.Argument(help="addition: learn from a data set; online: serve an agent, learn from its feedback.")
    ] = Show.ADDITION,
    *,
    file: Annotated[Path | None, typer.Option("--file", help="Another job file.")] = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    rollouts: Annotated[int, typer.Option(min=1, max=64, help="Rollout workers.")] = 1,
    limit_s: Annotated[
        float | None, typer.Option(min=1, help="online: give up after this many seconds; 240, hostile 900.")
    ] = None,
    hostile: Annotated[
        bool, typer.Option("--hostile", help="online: beside a key with 90 % of the traffic that judges inversely.")
    ] = False,
) -> None:
    """Start everything, train a small model, show what happened. Needs no GPU and no network."""
    directory = data_dir.expanduser().resolve() if data_dir else Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    options = demo_options(directory, rollouts=rollouts)
    try:
        if show is Show.ONLINE:
            live = load_online_job(file or example(ONLINE_DEMO), overrides or [], directory, hostile=hostile)
            shown = asyncio.run(run_online(live, options, hostile=hostile, limit_s=limit_s))
            for line in summary(shown, directory):
                console().print(line, soft_wrap=True)
            code = shown.code
        else:
            code = asyncio.run(_run(load_job(file or example(DEMO), overrides or []), options))
    except asyncio.CancelledError:  # SIGTERM
        code = INTERRUPTED
    raise typer.Exit(code)


def demo_options(directory: Path, *, rollouts: int = 1) -> StackOptions:
    """What a demo starts. No key is needed: the port is chosen at the start and open to this machine only."""
    environment = {"PENSTOCK_API_KEYS": "", **RATE}
    return StackOptions(data_dir=directory, workers={"rollout": rollouts}, environment=environment)


def example(name: str) -> Path:
    """A job file that comes with Penstock: inside the package, or beside the sources. Raises ConfigError."""
    package = Path(penstock.__file__).resolve().parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"the example {name} is not installed; give a job file with --file")


async def _run(job: AnyJob, options: StackOptions) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began = time.monotonic()
    screen = console()
    note(f"starting NATS, Valkey and the services in {options.data_dir}")
    async with Stack(options, note) as stack:
        await ready_with_progress(stack)
        note(f"{time.monotonic() - began:6.1f} s  ready at {stack.url} ({len(stack.processes)} processes)")
        async with AsyncClient(stack.url) as client:
            record = await client.submit(job)
            note(f"submitted {record.id}")
            view = await _watch(client, record.id, stack, screen)
            report = await client.audit(record.id)
        note("stopping the services")
        seconds = time.monotonic() - began
    ok = view.record.status.phase == "succeeded" and report["ok"]
    for line in _summary(view, report["equation"], report["ok"], seconds, options.data_dir):
        screen.print(line, soft_wrap=True)
    return 0 if ok else result_code(view.record) or 1


async def _watch(client: AsyncClient, job: str, stack: Stack, screen: Console) -> View:
    """Watch the job; a service that cannot go on ends the demo."""
    watching = asyncio.create_task(watch(client, job, screen))
    broken = asyncio.create_task(stack.broken())
    try:
        await asyncio.wait({watching, broken}, return_when=asyncio.FIRST_COMPLETED)
        if broken.done() and not watching.done():
            await broken
        return await watching
    finally:
        for task in (watching, broken):
            task.cancel()
        await asyncio.gather(watching, broken, return_exceptions=True)


def _summary(view: View, draws: dict[str, object], books_hold: bool, seconds: float, data_dir: Path) -> list[str]:
    status = view.record.status
    rewards = [value for value in view.series.get(REWARD, []) if value is not None]
    lines = ["", f"{view.record.name}: {status.phase} after {status.step} updates, {seconds:.0f} s in all"]
    if status.message:
        lines.append(f"  {status.message}")
    if rewards:
        first, last = rewards[:_ENDS], rewards[-_ENDS:]
        lines.append(f"  sampled reward  {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f}")
    for name, values in view.series.items():
        known = [value for value in values if value is not None]
        if name.startswith("eval/") and any(known):
            lines.append(f"  {name:<15} {known[0]:.3f} -> {known[-1]:.3f}   (held-out prompts)")
    lines.append(f"  groups          {equation(draws)}")
    lines.append(f"  books           {'hold' if books_hold else 'DO NOT HOLD, see: penstock audit'}")
    lines.append(f"  checkpoint      {status.checkpoint or 'none'}")
    lines.append(f"  logs            {data_dir / 'logs'}")
    return [*lines, "", "Next:", *_next(view, data_dir)]


def _next(view: View, data_dir: Path) -> list[str]:
    name = view.record.name
    commands = {
        f"penstock up --detach --data-dir {data_dir}": "the same deployment again",
        f"penstock samples {name} --sort=-reward": "what the model wrote",
        f"penstock replay {name}": "train it again and compare, bit by bit",
        f"penstock submit {example(DEMO)} --set train.max_lag=0 --follow": "strictly on-policy",
    }
    width = max(map(len, commands))
    return [f"  {command:<{width}}  # {what}" for command, what in commands.items()]
