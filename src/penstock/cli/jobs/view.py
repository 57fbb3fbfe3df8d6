"""Live view of a running job: collection of its data, and rendering."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.printing import duration, number, sparkline, table
from penstock.client import AsyncClient
from penstock.shared.protocol.jobs import TERMINAL_PHASES, JobRecord

__all__ = ["REWARD", "Observer", "View", "panel", "progress_line", "worker_table"]

REWARD = "reward/mean"
LAG = "lag/max"
_STAGES = "seconds_total/"
_RATE_WINDOW_S = 8.0
_COLOURS = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "paused": "yellow"}


@dataclass
class View:
    """State of a job at one moment."""

    record: JobRecord
    elapsed_s: float = 0.0
    series: dict[str, list[float | None]] = field(default_factory=dict)
    workers: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    tokens_per_s: float | None = None

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric, or None."""
        return next((v for v in reversed(self.series.get(name, [])) if v is not None), None)

    @property
    def rate(self) -> str:
        """Throughput of all rollout workers: tokens or simulator steps per second; '' while unknown."""
        what = "steps" if self.record.spec.get("kind") == "embodied" else "tokens"
        return "" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f} {what}/s"

    @property
    def running(self) -> int:
        """Number of sequences being decoded."""
        return sum(int(row.get("running") or 0) for row in self.workers if row.get("service") == "rollout")

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until the job ends; None if unknown."""
        status = self.record.status
        if status.phase != "running" or status.expected_end is None:
            return None
        return max(0.0, status.expected_end.timestamp() - time.time())

    def stages(self) -> dict[str, float]:
        """Return the share of the trainer's time by stage."""
        seconds = {
            name.removeprefix(_STAGES): self.last(name) or 0.0 for name in self.series if name.startswith(_STAGES)
        }
        total = sum(seconds.values())
        return {name: value / total for name, value in seconds.items()} if total > 0 else {}


class Observer:
    """Reads the state of one job from the API, as a ``View``."""

    def __init__(self, client: AsyncClient, job: str) -> None:
        self._client, self._job = client, job
        self._began = time.monotonic()
        self._tokens: deque[tuple[float, int]] = deque()

    async def look(self) -> View:
        """Return the current state of the job. Raises Unavailable if the API does not answer."""
        record = await self._client.get(self._job)
        metrics = await self._client.metrics(self._job, max_points=400)
        view = View(record, time.monotonic() - self._began, metrics["series"])
        if record.status.phase not in TERMINAL_PHASES:
            view.workers = await self._client.workers(self._job)
            view.waits = await self._client.why(self._job)
            view.tokens_per_s = self._rate(view.workers)
        return view

    def _rate(self, workers: list[dict[str, Any]]) -> float | None:
        now = time.monotonic()
        acting = [row for row in workers if row.get("service") == "rollout"]
        total = sum(int(row.get("generated_tokens") or row.get("steps") or 0) for row in acting)
        if self._tokens and total < self._tokens[-1][1]:  # a worker restarted and counts from 0
            self._tokens.clear()
        self._tokens.append((now, total))
        while now - self._tokens[0][0] > _RATE_WINDOW_S:
            self._tokens.popleft()
        first_time, first_total = self._tokens[0]
        return (total - first_total) / (now - first_time) if now - first_time > 0.5 else None


def progress_line(view: View) -> str:
    """Return the state of a job as one line, for logs and pipes."""
    status = view.record.status
    total = f"/{status.total_steps}" if status.total_steps else ""
    parts = [f"{view.elapsed_s:6.1f} s  {status.phase:<9} update {status.step}{total}  version {status.policy_version}"]
    reward = _reward(view)
    if reward is not None:
        parts.append(f"reward {reward:.3f} {sparkline(view.series.get(REWARD, []), 20)}".rstrip())
    lag = view.last(LAG)
    if lag is not None:
        parts.append(f"lag {lag:.0f}")
    if view.rate:
        parts.append(view.rate)
    parts.append(f"in flight {status.draws.get('in_flight', 0)}")
    if status.queues:
        parts.append(f"queues: {_queues(view, ', ')}")
    if view.left_s is not None:
        parts.append(f"{duration(view.left_s)} left")
    if not status.step and view.waits:
        parts.append(f"waits for {view.waits[0]['waiting_for']}")
    return "  ".join(parts)


def panel(view: View) -> RenderableType:
    """Return the state of a job as a panel for a terminal."""
    status = view.record.status
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("update", _steps(view))
    reward = _reward(view)
    history = sparkline(view.series.get(REWARD, []))
    grid.add_row("reward", Text(f"{number(reward) or '-':<8} {history}", "green"))
    lag = view.last(LAG)
    grid.add_row("policy", f"version {status.policy_version}   lag {number(lag) or '-'}")
    rate = view.rate or "-"
    grid.add_row("rollout", f"{rate}   {view.running} sequences   {status.draws.get('in_flight', 0)} draws in flight")
    if status.queues:
        grid.add_row("queues", _queues(view, "   "))
    stages = view.stages()
    if stages:
        grid.add_row("trainer", "   ".join(f"{name} {share:.0%}" for name, share in stages.items() if share >= 0.005))
    if view.waits:
        wait = view.waits[0]
        holder = f" ({wait['holder']})" if wait.get("holder") else ""
        grid.add_row("waits for", f"{wait['waiting_for']}{holder}, {number(wait['age_s'])} s")
    if status.message:
        grid.add_row("says", status.message)
    colour = _COLOURS.get(status.phase, "cyan")
    title = Text(f"{view.record.name}  {status.phase}  {view.elapsed_s:.0f} s", f"bold {colour}")
    return Panel(grid, title=title, title_align="left", subtitle=view.record.id, subtitle_align="left")


def worker_table(view: View) -> RenderableType:
    """Return the panel of a job, followed by a table of its workers."""
    rows = [
        (row["worker"], "alive" if row.get("alive") else "lost", row.get("version"), row.get("waiting_for") or "")
        for row in view.workers
    ]
    return Group(panel(view), table(("WORKER", "STATE", "VERSION#", "WAITS FOR"), rows))


def _steps(view: View) -> RenderableType:
    status = view.record.status
    if not status.total_steps:
        return str(status.step)
    row = Table.grid(padding=(0, 1))
    left = f"{duration(view.left_s)} left" if view.left_s is not None else ""
    row.add_row(f"{status.step}/{status.total_steps}", ProgressBar(status.total_steps, status.step, width=40), left)
    return row


def _queues(view: View, between: str) -> str:
    return between.join(f"{number(count)} {name}" for name, count in view.record.status.queues.items())


def _reward(view: View) -> float | None:
    reward = view.last(REWARD)
    return view.record.status.reward if reward is None else reward
