"""A restarted trainer that cannot repeat the batches in the ledger forks to a version above all known versions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.services.trainer.checkpoint.state import load_checkpoint, save_checkpoint
from penstock.services.trainer.progress import Progress
from penstock.services.trainer.publishing import Publishing
from penstock.services.trainer.rank_group import RankGroup
from penstock.services.trainer.ranks.heartbeats import Threads
from penstock.services.trainer.replica import Replica
from penstock.services.trainer.reports import Reporter
from penstock.services.trainer.start import Start
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Fenced
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ack, BatchManifest, Report
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.message import Outgoing

JOB = "job_1"
CONFIG = JobConfig.parse(
    {
        "name": "tiny",
        "model": {"config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "algorithm": {"group_size": 4},
        "train": {"batch_size": 4, "max_updates": 20},
    }
)


@dataclass
class Restart:
    """A trainer that is about to start, and its reports to the coordinator."""

    bus: Bus
    replica: Replica
    rank_group: RankGroup
    start: Start
    publishing: Publishing
    progress: Progress
    checkpoint: Path
    reports: list[Report] = field(default_factory=list)

    async def answer(self, data: bytes) -> bytes:
        self.reports.append(unpack(data, Report)[0])
        return pack(Ack(ok=True))

    async def restore(self, *, version: int) -> Report:
        """Restart from the checkpoint before batch 1, the last one in the ledger; return the report of the fork."""
        checkpoint = {"number": 0, "path": str(self.checkpoint)}
        batches = [[1, 1, 1, "a digest that nothing has"]]
        where = {"checkpoint": checkpoint, "version": version, "digest": "", "last_trained": 1, "batches": batches}
        await self.start.restore(where)
        (report,) = self.reports
        assert (report.kind, report.batch) == ("forked", 1)
        assert (self.progress.batch, self.progress.version) == (1, report.version)
        return report

    async def seal(self, *, failed: bool) -> None:
        """Publish batch 1, with one group; with ``failed``, all of its completions have failed."""
        group = Group(
            job=JOB, draw=Draw(0), attempt="a", epoch=0,
            prompt_ids=np.arange(4, 8, dtype=np.int32), token_ids=np.arange(8, 16, dtype=np.int32),
            cu_seqlens=np.array([0, 2, 4, 6, 8], np.int32), logprobs=np.full(8, -3, np.float32),
            mask=np.ones(8, np.uint8), rewards=np.array([0, 1, 0, 1], np.float32), failed=np.full(4, failed),
            finish=np.zeros(4, np.uint8), spans=np.array([[i, 0, 0, 2] for i in range(4)], np.int32),
        )  # fmt: skip
        data, header = encode_group(group)
        await self.bus.publish_whole([Outgoing(subjects.experience(JOB), data, group_headers(header))])
        sealed = SealedGroup(Draw(0), "a", 1, header.digest, 0, 0, [0, 1, 0, 1], 24, "rollout-0")
        manifest = BatchManifest(number=1, revision=1, start_version=0, update_index=0, groups=[sealed])
        await self.bus.publish(subjects.batches(JOB), pack(manifest, job=JOB))


@pytest.fixture
async def restart(bus: Bus, tmp_path: Path) -> AsyncIterator[Restart]:
    threads, reporter, progress = Threads(), Reporter(bus, JOB), Progress()
    replica = Replica(bus, JOB, CONFIG, world=None, threads=threads, checkpoints=tmp_path)
    rank_group = RankGroup(replica, None)
    await rank_group.open()
    state = replica.learner.state()
    checkpoint = await asyncio.to_thread(save_checkpoint, tmp_path / "checkpoints", JOB, 0, state, {})
    publishing = Publishing(bus, ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), JOB)
    start = Start(
        bus, JOB, CONFIG, rank_group=rank_group, publishing=publishing, reporter=reporter, progress=progress, epoch=2,
        wait=lambda *_: None, data_dir=tmp_path,
    )  # fmt: skip
    stage = Restart(bus, replica, rank_group, start, publishing, progress, checkpoint)
    server = await bus.serve(subjects.report(JOB), stage.answer)
    yield stage
    await server.close(0.5)
    publishing.close()
    threads.close()


async def test_an_older_trainer_cannot_replace_a_newer_manifest(restart: Restart) -> None:
    own = await restart.publishing.publish(restart.rank_group, version=2, epoch=2)
    later = pack(msgspec.structs.replace(own, epoch=3), job=JOB)
    await restart.bus.kv(subjects.MANIFESTS).put(JOB, later)
    with pytest.raises(Fenced, match="trainer epoch 3 > 2"):
        await restart.publishing.announce(own)


async def test_a_fork_is_above_every_announced_version(restart: Restart) -> None:
    """Engines already know the announced version, with other weights."""
    await restart.publishing.announce(await restart.publishing.publish(restart.rank_group, version=2, epoch=1))
    report = await restart.restore(version=1)
    assert report.version == 3
    assert "inputs of batch 1 are gone" in report.reason


def poison(state: Any) -> None:
    for tensor in state.models["policy"].weights.values():
        tensor.fill_(math.nan)


@pytest.mark.parametrize(
    ("failed", "damage", "reason"),
    [(True, None, "all 4 trajectories of the batch failed"), (False, poison, "has norm nan")],
    ids=["protocol", "non-finite"],
)
async def test_a_batch_that_cannot_be_trained_again_forks(
    restart: Restart, failed: bool, damage: Callable[[Any], None] | None, reason: str
) -> None:
    await restart.seal(failed=failed)
    if damage is not None:
        state = load_checkpoint(restart.checkpoint).state
        damage(state)
        restart.checkpoint = save_checkpoint(restart.checkpoint.parents[1], JOB, 0, state, {"damaged": True})
    before = load_checkpoint(restart.checkpoint).state.models["policy"].weights
    report = await restart.restore(version=1)
    assert "batch 1 cannot be trained again" in report.reason
    assert reason in report.reason
    assert report.version == 2
    after = restart.replica.learner.state().models["policy"].weights
    assert all(torch.equal(after[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in before.items())
    assert restart.replica._snapshot is None, "a copy of the state takes as much room as the state"
