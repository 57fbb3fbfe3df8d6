"""Commands that run a whole deployment on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

import penstock
from penstock.cli.deployment.engines import interpreter_with
from penstock.cli.exits import FAILED
from penstock.cli.printing import Json, note, show_json, show_line
from penstock.client.answers import DEFAULT_URL, authorities
from penstock.local import Stack, StackOptions, StreamSizes, UpState, read_state
from penstock.local.engines import engine_python, environment_of
from penstock.shared.config.jobs.kinds import AnyJob, TextJob
from penstock.shared.config.local_key import announced_dirs
from penstock.shared.config.rollout import ENGINE_PACKAGES, ENVIRONMENT_OF
from penstock.shared.config.service import load_settings
from penstock.shared.errors import ConfigError, DeadlineError, Unavailable

__all__ = ["DEMO", "DEMO_STREAMS", "DataDir", "down", "example", "pythons_for", "ready_with_progress", "up"]

DEMO = "addition.yaml"
"""Job file of the demo."""
DEMO_STREAMS = StreamSizes(experience_bytes=256 << 20, stream_bytes=128 << 20)
"""Sizes of the streams of a demo: enough for a few minutes, even with a hostile key, and small enough for a folder in
memory."""
READY = "ready (Ctrl-C stops everything)"
"""Log line of a deployment that is ready: ``up --detach`` copies the log only until this line appears."""
READY_S = 120.0
DOWN_S = 60.0

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of the store, the logs and checkpoints.")]


def up(
    *,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one.")] = None,
    data_dir: DataDir = None,
    rollouts: Annotated[int, typer.Option(min=1, max=64, help="Rollout workers.")] = 1,
    trainer_ranks: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes (ranks) of the trainer, for sharded models.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help=f"Engine with an interpreter of its own: {', '.join(ENVIRONMENT_OF)}; or NAME=PYTHON."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the bus and all services on this machine, and restart processes that die. Ctrl-C stops everything."""
    settings = load_settings()
    options = StackOptions(
        data_dir=(data_dir or settings.data_dir).expanduser().resolve(),
        http_host=settings.http_host,
        http_port=settings.http_port if port is None else port,
        nats_url=os.environ.get("PENSTOCK_NATS_URL"),
        redis_url=settings.redis_url,
        workers={"rollout": rollouts},
        trainer_ranks=trainer_ranks or settings.trainer_ranks,
        drain_s=settings.drain_s,
        pythons={} if engine is None else _pythons(engine),
    )
    if detach:
        _detached(options, rollouts, engine, as_json=as_json)
    else:
        asyncio.run(_serve(options, as_json=as_json))


def _pythons(engine: str) -> dict[str, Path]:
    """Return ``{"rollout": interpreter}`` if the engine runs inside the rollout workers, else {}.

    For an engine outside the workers, set the environment variable from which the workers read its interpreter.
    """
    python, name = interpreter_with(engine), engine.partition("=")[0]
    if name in ENGINE_PACKAGES:
        return {"rollout": python}
    os.environ[f"PENSTOCK_{environment_of(name).upper()}_PYTHON"] = str(python)
    return {}


def pythons_for(job: AnyJob) -> dict[str, Path]:
    """Return the interpreters that a job's engine needs, by service. Raises ConfigError if the engine is missing."""
    if not isinstance(job, TextJob) or job.rollout.engine not in ENGINE_PACKAGES:
        return {}
    return {"rollout": engine_python(job.rollout.engine, load_settings().engines_dir)}


def down(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Stop the deployment in --data-dir. Default: the deployment in the default folder, or else your only running
    one."""
    directory = data_dir.expanduser().resolve() if data_dir else _running()
    state = read_state(directory)
    if state is None:
        if as_json:
            show_json({"stopped": False})
        note(f"nothing runs in {directory}")
        return
    note(f"stopping process {state.pid} ({state.url}); services finish their current work")
    began = time.monotonic()
    _signal(state, signal.SIGTERM)
    while read_state(directory) is not None or _lives(state.pid):
        waited = time.monotonic() - began
        if waited > DOWN_S:
            _signal(state, signal.SIGKILL)
            raise DeadlineError(f"it did not stop within {DOWN_S:g} s and was killed; nothing acknowledged is lost")
        time.sleep(0.1)
    if as_json:
        show_json({"stopped": True, "seconds": round(time.monotonic() - began, 3)})
    note(f"stopped after {time.monotonic() - began:.1f} s")


def _running() -> Path:
    """Return the data directory of the deployment that ``down`` should stop.

    This is the default directory if a deployment runs there, or if none runs at all; otherwise it is the directory of
    this user's only running deployment. Raises ConfigError if several run, all of them elsewhere.
    """
    usual = load_settings().data_dir.expanduser().resolve()
    if read_state(usual) is not None:
        return usual
    found = [directory for directory in announced_dirs() if read_state(directory) is not None]
    if len(found) > 1:
        raise ConfigError(f"several deployments run here: choose one with --data-dir: {', '.join(map(str, found))}")
    return found[0] if found else usual


def example(name: str) -> Path:
    """Return the path of an example job file, in the package or in the sources. Raises ConfigError if it is missing."""
    package = Path(penstock.__file__).resolve().parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"the example {name} is not installed; give a job file with --file")


async def ready_with_progress(stack: Stack) -> None:
    """Wait until every service is ready; print the names of the missing services whenever these names change."""
    began = time.monotonic()
    before: list[str] = []

    def report(missing: list[str]) -> None:
        nonlocal before
        if missing and missing != before:
            note(f"{time.monotonic() - began:6.1f} s  waiting for {', '.join(missing)}")
        before = list(missing)

    await stack.ready(deadline_s=READY_S, waiting=report)


async def _serve(options: StackOptions, *, as_json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop)
    note(f"starting in {options.data_dir}")
    stack = Stack(options, note)
    try:
        await _first(stop, stack.__aenter__())  # the bus may take long to open a large store
        if not stop.is_set():
            await _first(stop, ready_with_progress(stack))
        if not stop.is_set():
            if as_json:
                show_line(_facts(stack.url, os.getpid(), options.data_dir, stack.processes))
            note(READY)
            _note_next(stack.url)
            await _first(stop, stack.broken())
        note("stopping; services finish their current work (Ctrl-C again: at once)")
    finally:
        await stack.close()


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(FAILED)  # the children end with this process
    stop.set()


def _note_next(url: str) -> None:
    """Print the URL of the dashboard, and commands to continue with."""
    note(f"the page is at {url}/")
    if url != DEFAULT_URL:
        note(f"for other commands: export PENSTOCK_URL={url}")
    with contextlib.suppress(ConfigError):  # the package lacks its examples
        note(f"next: penstock submit {example(DEMO)} --follow")


async def _first(stop: asyncio.Event, work: object) -> None:
    """Run the coroutine ``work`` until it ends or ``stop`` is set, which cancels it. Raise any error of ``work``."""
    assert asyncio.iscoroutine(work)
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
    results = await asyncio.gather(task, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]


def _detached(options: StackOptions, rollouts: int, engine: str | None, *, as_json: bool) -> None:
    log = options.data_dir / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "penstock.cli", "up", "--data-dir", str(options.data_dir)]
    command += ["--port", str(options.http_port), "--rollouts", str(rollouts)]
    command += ["--trainer-ranks", str(options.trainer_ranks)]
    command += [] if engine is None else ["--engine", engine]
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    seen = time.monotonic()
    shown = start
    while time.monotonic() < seen + READY_S + 10:  # new log lines extend the deadline: a large store opens slowly
        before, shown = shown, _copy_new_lines(log, shown, until=READY)
        seen = time.monotonic() if shown > before else seen
        if process.poll() is not None:
            _copy_new_lines(log, shown)
            raise typer.Exit(process.returncode or FAILED)
        state = read_state(options.data_dir)
        if state is not None and state.pid == process.pid and _is_ready(state.url):
            usual = load_settings().data_dir.expanduser().resolve() == options.data_dir
            down = "penstock down" if usual else f"penstock down --data-dir {options.data_dir}"
            note(f"runs in the background (process {process.pid}); stop it with: {down}")
            _note_next(state.url)
            if as_json:
                show_line(_facts(state.url, state.pid, options.data_dir, state.processes))
            else:
                typer.echo(state.url)
            return
        time.sleep(0.2)
    raise DeadlineError(f"not ready after {READY_S:g} s; see {log}, and 'penstock down' to stop it")


def _facts(url: str, pid: int, data_dir: Path, processes: dict[str, int]) -> dict[str, Any]:
    return {"url": url, "pid": pid, "data_dir": str(data_dir), "processes": processes}


def _copy_new_lines(log: Path, start: int, *, until: str = "") -> int:
    """Print the complete lines of a log from byte ``start`` on. Stop before the first occurrence of the marker text
    ``until``, if any.

    Returns the offset after the last printed line.
    """
    data = log.read_bytes()[start:]
    last = data.find(until.encode()) if until else -1
    end = data.rfind(b"\n") + 1 if last < 0 else last
    if end:
        note(data[:end].decode("utf-8", "replace").rstrip("\n"))
    return start + end


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0, verify=authorities(url)).is_success
    except httpx.TransportError:
        return False


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(state: UpState, number: signal.Signals) -> None:
    try:
        os.kill(state.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise Unavailable(f"process {state.pid} belongs to another user") from None
