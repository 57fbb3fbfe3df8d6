"""Trackers on a real bus: every row arrives once, also after a change of leader; a broken tracker affects no other."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.outbox import Outbox
from penstock.services.coordinator.leader.tracking import Tracking
from penstock.services.coordinator.trackers import Run, check_trackers, open_tracker
from penstock.shared.config.tracking import SwanLabTracker, TensorBoardTracker, TrackerConfig, WandbTracker
from penstock.shared.errors import ConfigError
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus

JOB = "job_tracked"


def run_of(directory: Path) -> Run:
    return Run(JOB, "tracked", {"name": "tracked"}, directory)


@asynccontextmanager
async def led(bus: Bus, directory: Path, *configs: TrackerConfig) -> AsyncIterator[Outbox]:
    """Run a leader's outbox; at the end of the block all its rows are in the trackers."""
    outbox = Outbox(bus, JobStore(bus), JOB)
    tracking = Tracking(bus, outbox, configs, run_of(directory))
    tasks = [asyncio.create_task(outbox.run()), asyncio.create_task(tracking.follow())]
    try:
        yield outbox
        await outbox.flush()
        await tracking.finish()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loading.EventAccumulator(str(directory))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


async def test_tensorboard_shows_every_row_once_under_two_leaders(bus: Bus, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    async with led(bus, tmp_path / "t", TensorBoardTracker()) as outbox:
        for step in range(1, 4):
            outbox.metrics("train", step, step, {"reward/mean": step / 4, "loss": float("nan")}, batch=step)
    async with led(bus, tmp_path / "t", TensorBoardTracker()) as outbox:
        outbox.metrics("train", 4, 4, {"reward/mean": 1.0}, batch=4)
        outbox.metrics("eval", 4, 4, {"eval/greedy": 0.5}, batch=4)
    assert len(list((tmp_path / "t").glob("events.out.tfevents.*"))) == 2
    assert scalars(tmp_path / "t", "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert scalars(tmp_path / "t", "eval/greedy") == [(4, 0.5)]


class Recorder:
    """Stands for a package that is not installed here, and records the calls of the adapter."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            if name == self.failing:
                raise OSError("no network")
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def install(monkeypatch: pytest.MonkeyPatch, package: str, recorder: Recorder) -> None:
    module = types.ModuleType(package)
    for name in ("init", "log", "finish"):
        setattr(module, name, getattr(recorder, name))
    monkeypatch.setitem(sys.modules, package, module)


@pytest.mark.parametrize(("failing", "logged"), [("log", 1), ("finish", 3)])
async def test_a_failing_tracker_is_left_out_with_an_event(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, logged: int
) -> None:
    pytest.importorskip("tensorboard")
    broken = Recorder(failing)
    install(monkeypatch, "wandb", broken)
    async with led(bus, tmp_path / "t", WandbTracker(project="p"), TensorBoardTracker()) as outbox:
        for step in range(1, 4):
            outbox.metrics("train", step, step, {"reward/mean": 0.5}, batch=step)
    assert len(broken.named("log")) == logged
    assert len(scalars(tmp_path / "t", "reward/mean")) == 3
    events = await bus.read(subjects.EVENTS, subjects.events(JOB))
    assert any(b"wandb is left out from here on" in event.data and b"no network" in event.data for event in events)


def test_wandb_resumes_the_run_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    install(monkeypatch, "wandb", recorder)
    tracker = open_tracker(WandbTracker(project="p", mode="offline"), run_of(tmp_path))
    tracker.write(3, 100.0, {"reward/mean": 0.5})
    tracker.close()
    (_, init) = recorder.named("init")[0]
    assert (init["id"], init["project"], init["mode"], init["resume"]) == (JOB, "p", "offline", "allow")
    assert recorder.named("log") == [(({"update": 3, "reward/mean": 0.5},), {})]
    assert len(recorder.named("finish")) == 1


def test_swanlab_logs_by_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    install(monkeypatch, "swanlab", recorder)
    tracker = open_tracker(SwanLabTracker(project="p", mode="offline"), run_of(tmp_path))
    tracker.write(3, 100.0, {"reward/mean": 0.5})
    tracker.close()
    assert recorder.named("init")[0][1]["mode"] == "offline"
    assert recorder.named("log") == [(({"reward/mean": 0.5},), {"step": 3})]
    assert len(recorder.named("finish")) == 1


def test_a_missing_package_is_named_at_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"tracking\[1\]: the package 'swanlab' is not installed beside"):
        monkeypatch.setattr(
            "penstock.services.coordinator.trackers.find_spec", lambda name: None if name == "swanlab" else object()
        )
        check_trackers([WandbTracker(project="p"), SwanLabTracker(project="p")])
