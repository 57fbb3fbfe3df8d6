"""``penstock demo``: a whole deployment on this machine, and one small job from start to end."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.cli.demo.online import LIMIT_S, load_online_job, run_online, tell_online
from penstock.cli.demo.outcome import GOAL, Outcome, scores_of
from penstock.cli.deployment.machine import DEMO, DEMO_STREAMS, DataDir, example, pythons_for, ready_with_progress
from penstock.cli.deployment.sims import ensure_simulator
from penstock.cli.exits import INTERRUPTED
from penstock.cli.jobs.commands import Overrides, load_job
from penstock.cli.jobs.view import REWARD, View
from penstock.cli.jobs.watching import watch
from penstock.cli.printing import Json, console, note, show_json
from penstock.client import AsyncClient
from penstock.local import LARGEST, Stack, StackOptions
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import AnyJob
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["demo", "demo_options"]

ONLINE_DEMO, ROBOT_DEMO = "online.yaml", "metaworld-reach-ppo.yaml"
SUCCESS = "success/rate"
"""Name of the metric for the share of successful episodes in an update."""
VIDEO_S = 300.0
"""Longest time to wait for a video (seconds): rendering runs beside the training and may finish later."""
NO_VIDEOS = "there will be no videos"
RATE = {"PENSTOCK_RATE_LIMIT": "1000000/minute"}
"""Setting of the API's rate limit in the demo: very high, because one agent stands for many users."""


class Show(StrEnum):
    """Variants of the demo."""

    ADDITION = "addition"
    ONLINE = "online"
    ROBOT = "robot"


def demo(
    show: Annotated[
        Show,
        typer.Argument(help="addition: learn from data; online: from an agent's feedback; robot: in a simulator."),
    ] = Show.ADDITION,
    *,
    file: Annotated[Path | None, typer.Option("--file", help="Another job file.")] = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    rollouts: Annotated[int, typer.Option(min=1, max=64, help="Rollout workers.")] = 1,
    limit_s: Annotated[float, typer.Option(min=1, help="online: give up after this many seconds.")] = LIMIT_S,
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="online: add an attacker with 90 % of the traffic who inverts every verdict."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Start everything, train a small model, show what happened. Exits 1 if it did not learn. Needs no GPU."""
    directory = data_dir.expanduser().resolve() if data_dir else Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    options = demo_options(directory, rollouts=rollouts)
    if file is not None:  # its needs are unknown
        options = replace(options, largest=LARGEST)
    screen = console(stderr=as_json)
    try:
        if show is Show.ONLINE:
            live = load_online_job(file or example(ONLINE_DEMO), overrides or [], directory, hostile=hostile)
            options = replace(options, pythons=pythons_for(live))
            shown = asyncio.run(run_online(live, options, hostile=hostile, limit_s=limit_s, screen=screen))
            tell_online(shown, directory, as_json=as_json)
            code = shown.code
        else:
            robot = show is Show.ROBOT
            job = load_job(file or example(ROBOT_DEMO if robot else DEMO), overrides or [])
            if isinstance(job, EmbodiedJob):
                ensure_simulator(job.environment.backend)
            options = replace(options, pythons=pythons_for(job))
            goal = GOAL if file is None else None
            outcome = asyncio.run(_run(job, options, screen, goal))
            _print(outcome, screen, as_json=as_json)
            code = outcome.code
    except asyncio.CancelledError:  # SIGTERM
        code = INTERRUPTED
    raise typer.Exit(code)


def demo_options(directory: Path, *, rollouts: int = 1) -> StackOptions:
    """Return the options of a demo's deployment, which creates its own API key and ignores configured keys."""
    environment = {"PENSTOCK_API_KEYS": "", **RATE}
    return StackOptions(
        data_dir=directory, workers={"rollout": rollouts}, environment=environment, largest=DEMO_STREAMS
    )


async def _run(job: AnyJob, options: StackOptions, screen: Console, goal: float | None) -> Outcome:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began = time.monotonic()
    note(f"starting NATS, Valkey and the services in {options.data_dir}")
    async with Stack(options, note) as stack:
        await ready_with_progress(stack)
        note(f"{time.monotonic() - began:6.1f} s  ready at {stack.url} ({len(stack.processes)} processes)")
        async with AsyncClient(stack.url, api_key=stack.api_key) as client:
            record = await client.submit(job)
            note(f"submitted {record.id}")
            view = await _watch(client, record.id, stack, screen)
            metrics = await client.metrics(record.id, max_points=10_000)
            report = await client.audit(record.id)
            video = await _fetch_video(client, view.record, options.data_dir) if isinstance(job, EmbodiedJob) else ""
        note("stopping the services")
        seconds = time.monotonic() - began
    series = metrics["series"]
    name, what = REWARD, "mean return" if isinstance(job, EmbodiedJob) else "sampled reward"
    if SUCCESS in series:  # missing if the simulator does not report success
        name, what = SUCCESS, "success rate"
    values = [value for value in series.get(name, []) if value is not None]
    evaluations = scores_of(series)
    return Outcome(view.record, values, report, seconds, options.data_dir, goal, what, evaluations, video)


async def _fetch_video(client: AsyncClient, record: JobRecord, directory: Path) -> str:
    """Download the last policy's video and return its path, or the reason why there is none.

    Return '' if the job records no videos.
    """
    if not (record.spec.get("evaluation") or {}).get("videos"):
        return ""
    async for event in client.events(record.id, follow=False):
        if NO_VIDEOS in event["message"]:
            return str(event["message"])
    until, path = time.monotonic() + VIDEO_S, directory / "videos"
    note("waiting for the film of the last policy")
    while time.monotonic() < until:
        rows = [row for row in await client.videos(record.id) if row["version"] == record.status.policy_version]
        for row in rows:
            if row["error"]:
                return f"none: {row['error']}"
            await client.download_video(record.id, row["name"], path / row["name"])
            return str(path / row["name"])
        await asyncio.sleep(0.5)
    return f"not made within {VIDEO_S:g} s; penstock videos {record.name} has those of earlier policies"


async def _watch(client: AsyncClient, job: str, stack: Stack, screen: Console) -> View:
    """Show the job until it ends; return its state at the end. Raises ConfigError if a service cannot continue."""
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


def _print(outcome: Outcome, screen: Console, *, as_json: bool) -> None:
    if as_json:
        show_json(outcome.plain())
    else:
        for line in [*outcome.lines(), "", "Next:", *_next(outcome)]:
            screen.print(line, soft_wrap=True)
    for flaw in outcome.flaws():
        note(f"error: {flaw}")


def _next(outcome: Outcome) -> list[str]:
    name = outcome.record.name
    again = {f"penstock submit {example(DEMO)} --set train.max_lag=0 --follow": "strictly on-policy"}
    if outcome.record.spec.get("kind") == "embodied":
        again = {f"penstock submit {example(ROBOT_DEMO)} --set environment.task=push-v3 --follow": "another task"}
    question = " '3+4='" if outcome.goal is not None else ""  # another job file, another task
    served = {
        f"penstock serve {name} --name {name}-chat": "its newest checkpoint, behind an OpenAI-compatible API",
        f"penstock chat {name}-chat{question}": f"ask it; penstock cancel {name}-chat ends it",
        f"penstock export {name} --to {name}-model": "a folder for transformers",
    }
    commands = {
        f"penstock up --detach --data-dir {outcome.data_dir}": "the same deployment again; penstock down ends it",
        **(served if outcome.record.spec.get("kind", "rl") == "rl" else {}),
        f"penstock samples {name} --sort=-reward": "what the policy did",
        f"penstock replay {name}": "train it again and compare, bit by bit",
        **again,
    }
    width = max(map(len, commands))
    return [f"  {command:<{width}}  # {what}" for command, what in commands.items()]
