"""Commands that watch a job to its end: they print events as they arrive, and show the progress below."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from penstock.cli.exits import INTERRUPTED, result_code
from penstock.cli.jobs.view import Observer, View, panel, progress_line, worker_table
from penstock.cli.printing import Json, console, event_line, note, note_warnings, show_json, show_line
from penstock.client import AsyncClient
from penstock.client.patience import Patience
from penstock.shared.errors import NotFound, Unavailable
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord

__all__ = ["follow", "top", "watch"]

RECORD_S = 60.0
"""Timeout of the wait, after the last event of a job, for its record to show that the job has ended (seconds)."""

POLL_S = 0.5
LINE_S, QUIET_S = 3.0, 15.0
"""Minimum time between two progress lines (seconds): if the job has made a new update since, and if not. Progress lines
are printed where the output is no terminal."""
PATIENCE_S = 60.0
_LAST_EVENTS_S = 2.0


def top(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Default: the newest job that runs.")] = None,
    as_json: Json = False,
) -> None:
    """Watch a job: update, reward, lag, speed, workers, and its waits. Ctrl-C leaves the job running."""
    asyncio.run(_top(job, as_json))


def follow(record: JobRecord, *, as_json: bool) -> int:
    """Watch a job to its end and return its exit code. Ctrl-C detaches and prints how to continue."""
    try:
        last = asyncio.run(_follow(record, as_json))
    except KeyboardInterrupt:
        note(f"detached; the job goes on. Watch it again with: penstock top {record.id}")
        return INTERRUPTED
    if as_json:
        show_line(last)
    else:
        typer.echo(f"{last.id} {last.status.phase} {last.status.message}".strip())
    note_warnings(last)
    return result_code(last)


async def watch(
    client: AsyncClient,
    job: str,
    screen: Console,
    *,
    draw: Callable[[View], RenderableType] = panel,
    with_events: bool = True,
) -> View:
    """Show a job until it ends; return its state at the end.

    A terminal shows a live panel below the events. Otherwise progress lines are printed: one per update, at least
    LINE_S seconds apart, and one every QUIET_S seconds without an update.

    Raises:
        Unavailable: the API was unreachable for longer than PATIENCE_S.
    """
    show = _Panel(screen, draw) if screen.is_terminal else _Lines(screen)
    teller = asyncio.create_task(_print_events(client, job, screen)) if with_events else None
    try:
        with show:
            view = await _look_until_done(Observer(client, job), show)
            if teller is not None:
                await asyncio.wait({teller}, timeout=_LAST_EVENTS_S)
            return view
    finally:
        if teller is not None:
            teller.cancel()
            with contextlib.suppress(asyncio.CancelledError, Unavailable):
                await teller


async def _look_until_done(observer: Observer, show: _Panel | _Lines) -> View:
    patience = Patience(PATIENCE_S)
    while True:
        try:
            view = await observer.look()
        except Unavailable as error:
            pause = patience.after(error)
            show.warn(f"the API does not answer; trying again in {pause:.1f} s")
            await asyncio.sleep(pause)
            continue
        patience.renew()
        done = view.record.status.phase in TERMINAL_PHASES
        show.update(view, last=done)
        if done:
            return view
        await asyncio.sleep(POLL_S)


async def _print_events(client: AsyncClient, job: str, screen: Console) -> None:
    async for row in client.events(job):
        screen.print(event_line(row), soft_wrap=True)


class _Panel:
    """Panel that redraws itself in a terminal."""

    def __init__(self, screen: Console, draw: Callable[[View], RenderableType]) -> None:
        self._draw = draw
        self._live = Live(console=screen, refresh_per_second=8, transient=False)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, view: View, *, last: bool) -> None:
        """Redraw the panel with the new state ``view`` of the job."""
        self._live.update(self._draw(view), refresh=last)

    def warn(self, text: str) -> None:
        """Print a message above the panel."""
        self._live.console.print(text)


class _Lines:
    """Progress lines for outputs that cannot be redrawn."""

    def __init__(self, screen: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen, self._clock = screen, clock
        self._printed_at, self._printed_step = -math.inf, -1

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return

    def update(self, view: View, *, last: bool) -> None:
        """Print a line about the new state ``view`` of the job, if a line is due or it is the last state."""
        now, step = self._clock(), view.record.status.step
        if last or now - self._printed_at >= (LINE_S if step != self._printed_step else QUIET_S):
            self._screen.print(progress_line(view), soft_wrap=True)
            self._printed_at, self._printed_step = now, step

    def warn(self, text: str) -> None:
        """Print a message."""
        self._screen.print(text, soft_wrap=True)


async def _follow(record: JobRecord, as_json: bool) -> JobRecord:
    async with AsyncClient() as client:
        if not as_json:
            note(f"following {record.id}; Ctrl-C detaches, the job goes on")
            return (await watch(client, record.id, console())).record
        async for row in client.events(record.id):
            show_line(row)
        return await client.wait(record.id, timeout_s=RECORD_S)


async def _top(ref: str | None, as_json: bool) -> None:
    async with AsyncClient() as client:
        record = await client.find(ref) if ref is not None else await _newest(client)
        if as_json:
            view = await Observer(client, record.id).look()
            show_json(_plain(view))
            return
        await watch(client, record.id, console(), draw=worker_table, with_events=False)


async def _newest(client: AsyncClient) -> JobRecord:
    records = await client.list(limit=100)
    live = [record for record in records if record.status.phase not in TERMINAL_PHASES]
    if not records:
        raise NotFound("there are no jobs; submit one with: penstock submit FILE")
    return (live or records)[0]


def _plain(view: View) -> dict[str, Any]:
    return {
        "job": view.record.model_dump(mode="json"),
        "metrics": {name: view.last(name) for name in view.series},
        "workers": view.workers,
        "why": view.waits,
    }
