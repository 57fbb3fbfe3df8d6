"""Checkpoints during training: copied between batches, written and recorded meanwhile, and retried after failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.trainer import checkpointing as module
from penstock.services.trainer.backends.base import BackendState, LearnerState
from penstock.services.trainer.checkpoint.state import list_checkpoints, load_checkpoint, save_checkpoint
from penstock.services.trainer.checkpointing import Checkpointing
from penstock.services.trainer.progress import Progress
from penstock.services.trainer.rank_group import RankGroup
from penstock.services.trainer.ranks.heartbeats import Threads
from penstock.services.trainer.replica import Replica
from penstock.services.trainer.reports import Reporter
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.messages import Ack, Report
from penstock.shared.runtime.tasks import Background, wait_for
from penstock.shared.transport.bus import Bus

JOB = "job_1"
CONFIG = JobConfig.parse(
    {
        "name": "tiny",
        "model": {"config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "algorithm": {"group_size": 4},
        "train": {"batch_size": 16, "max_updates": 20},
        "checkpoint": {"keep": 1},
    }
)


@dataclass
class Coordinator:
    """Coordinator that answers reports once ``open`` is set."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    reports: list[Report] = field(default_factory=list)

    async def answer(self, data: bytes) -> bytes:
        await self.open.wait()
        self.reports.append(unpack(data, Report)[0])
        return pack(Ack(ok=True, data={"pinned": [1]}))


@dataclass
class Stage:
    root: Path
    rank_group: RankGroup
    checkpointing: Checkpointing
    coordinator: Coordinator
    woken: asyncio.Event


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    threads, coordinator, woken = Threads(), Coordinator(), asyncio.Event()
    root = tmp_path / "checkpoints"
    rank_group = RankGroup(Replica(bus, JOB, CONFIG, world=None, threads=threads, checkpoints=root), None)
    await rank_group.open()
    reporter = Reporter(bus, JOB)
    checkpointing = Checkpointing(
        rank_group, reporter, JOB, CONFIG, root=root, epoch=3, pinned=set(), wake=woken.set
    )  # fmt: skip
    server = await bus.serve(subjects.report(JOB), coordinator.answer)
    async with Background() as background:
        background.spawn(reporter.run(), name="reports")
        background.spawn(checkpointing.run(), name="checkpoints")
        yield Stage(root, rank_group, checkpointing, coordinator, woken)
    await server.close(0.5)
    threads.close()


async def test_training_goes_on_while_a_checkpoint_is_recorded(stage: Stage) -> None:
    def take(batch: int) -> Coroutine[Any, Any, None]:
        return stage.checkpointing.take(Progress(version=batch, batch=batch, digest="d"))

    stage.checkpointing.ask("interval")
    assert stage.checkpointing.asked
    await take(1)
    assert not stage.checkpointing.asked
    assert not stage.coordinator.reports
    await stage.rank_group.publish(lambda learner: learner.layout())  # the thread that computes is idle
    await take(1)  # requested again: nothing new to write
    following = asyncio.create_task(take(2))
    await wait_for(_exists(stage.root, 1), 30, "the first checkpoint")
    assert not following.done(), "one copy at a time"
    stage.coordinator.open.set()
    await wait_for(following, 30, "the second copy")
    await take(3)
    await wait_for(stage.checkpointing.written(), 30, "all of them")
    reported = dict.fromkeys((r.kind, r.batch, r.epoch, r.reason) for r in stage.coordinator.reports)  # may repeat
    assert list(reported) == [
        ("checkpointed", 1, 3, "interval"),
        ("checkpointed", 2, 3, ""),
        ("checkpointed", 3, 3, ""),
    ]
    kept = list_checkpoints(stage.root, JOB)
    assert [stored.manifest.number for stored in kept] == [1, 3], "the newest, and the pinned one"
    assert kept[-1].path == stage.root.parent / stage.coordinator.reports[-1].path
    assert load_checkpoint(kept[-1].path).meta["digest"] == "d"


async def test_a_request_during_a_write_is_ignored_and_can_be_repeated(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def undeletable(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    stage.checkpointing.ask("interval")
    await stage.checkpointing.take(Progress(version=1, batch=1, digest="d"))
    stage.woken.clear()
    stage.checkpointing.ask("interval")
    assert not stage.checkpointing.asked, "training does not wait for a second copy"
    assert not stage.woken.is_set()
    await save_other(stage.root, 0)
    monkeypatch.setattr("shutil.rmtree", undeletable)
    stage.coordinator.open.set()
    await wait_for(stage.checkpointing.written(), 30, "the checkpoint")
    assert "Operation not permitted" in caplog.text, "the disk keeps an old checkpoint: no reason to stop training"
    stage.checkpointing.ask("interval")
    assert stage.checkpointing.asked


async def save_other(root: Path, number: int) -> None:
    """Save an old checkpoint of the same job."""
    policy = BackendState(weights={"w": torch.zeros(1)}, optimizer={}, reference={}, rng={"cpu": torch.get_rng_state()})
    state = LearnerState(models={"policy": policy}, rule={})
    await asyncio.to_thread(save_checkpoint, root, JOB, number, state, {})


async def test_a_checkpoint_that_cannot_be_written_is_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    stage.coordinator.open.set()
    stage.root.write_text("in the way")
    stage.checkpointing.ask("the end")
    stage.woken.clear()
    await stage.checkpointing.take(Progress(version=1, batch=1, digest="d"))
    await wait_for(stage.woken.wait(), 30, "another try")
    assert stage.checkpointing.asked
    stage.root.unlink()
    await stage.checkpointing.take(Progress(version=1, batch=1, digest="d"))
    await wait_for(stage.checkpointing.written(), 30, "the checkpoint")
    assert {(r.batch, r.reason) for r in stage.coordinator.reports} == {(1, "the end")}
    assert [stored.manifest.number for stored in list_checkpoints(stage.root, JOB)] == [1]


async def test_a_required_checkpoint_is_retried_until_it_is_written(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    stage.coordinator.open.set()
    stage.root.write_text("in the way")
    progress, wanted = Progress(version=1, batch=1, digest="d"), True
    securing = asyncio.create_task(stage.checkpointing.secure(progress, "to leave", wanted=lambda: wanted))
    for _ in range(2):
        stage.woken.clear()
        await wait_for(stage.woken.wait(), 30, "another try")
    assert not securing.done()
    stage.root.unlink()
    await wait_for(securing, 30, "the checkpoint")
    assert {(r.batch, r.reason) for r in stage.coordinator.reports} == {(1, "to leave")}
    stage.root.rename(stage.root.with_name("elsewhere"))
    stage.root.write_text("in the way")
    later = Progress(version=2, batch=2, digest="d")
    securing = asyncio.create_task(stage.checkpointing.secure(later, "to leave", wanted=lambda: wanted))
    stage.woken.clear()
    await wait_for(stage.woken.wait(), 30, "another try")
    wanted = False
    await wait_for(securing, 30, "its end")
    assert {r.batch for r in stage.coordinator.reports} == {1}


async def _exists(root: Path, number: int) -> None:
    while not any(stored.manifest.number == number for stored in list_checkpoints(root, JOB)):
        await asyncio.sleep(0.02)
