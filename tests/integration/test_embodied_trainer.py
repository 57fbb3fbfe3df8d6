"""A trainer of an embodied job against a ledger: training, restart and replay give the same digests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.services.trainer.batch import replay_buffer
from penstock.services.trainer.replay import Replay
from penstock.services.trainer.session import TrainerSession
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.service import ServiceSettings, checkpoint_path
from penstock.shared.models.episode_policy import build_policy
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.embodied.environment import ArraySpec
from penstock.shared.protocol.embodied.episode_group import encode_episode_group
from penstock.shared.protocol.events import (
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Event,
    JobStarted,
    SealedGroup,
    encode_events,
)
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.messages import Ack, BatchManifest, Command, ReplayRow, Report
from penstock.shared.transport.bus import Bus
from tests.unit.trainer.episode_batches import CHUNK, group_of, job_of, spec_of

JOB, DEADLINE_S = "job_1", 90
PPO, SAC = job_of(), job_of({"warmup_transitions": 40, "steps_per_update": 2}, {"type": "squashed"})
PICTURES = job_of(policy={"type": "tokens", "observations": ["state", "image"], "encoder": {"channels": [4, 4]}})
IMAGE = (9, 12, 2)
SPECS = {
    PPO.policy.type: spec_of(action_low=[-np.inf, -2.0]),
    SAC.policy.type: spec_of(),
    PICTURES.policy.type: spec_of(observations={**spec_of().observations, "image": ArraySpec(IMAGE, "uint8")}),
}


@dataclass
class Leader:
    """Coordinator that seals batches of recorded groups, records reports in the ledger, and answers where to start."""

    bus: Bus
    config: EmbodiedJob
    environment: dict[str, Any] = field(default_factory=dict)
    trained: list[BatchTrained] = field(default_factory=list)
    checkpoints: list[Checkpointed] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    forks: int = 0

    async def begin(self) -> None:
        """Store the record of the job and the first event of its ledger."""
        spec = self.config.model_dump(mode="json")
        record = JobRecord(id=JOB, name="reach", created_at=datetime.now(UTC), spec=spec)
        await self.bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())
        self.environment = msgspec.to_builtins(SPECS[self.config.policy.type])
        await self._write(JobStarted(**self._stamp, config_digest="", environment=self.environment))

    async def seal(self, number: int) -> None:
        """Seal batch ``number`` from two groups of the version before it."""
        policy = build_policy(self.config.policy, SPECS[self.config.policy.type], action_chunk=CHUNK, seed=0)
        objective = "replay" if self.config.algorithm.type == "sac" else "policy"
        groups = []
        for ordinal in (2 * number, 2 * number + 1):
            group = group_of(
                policy, ordinal, version=number - 1, objective=objective, failed=(0,) if ordinal == 5 else (),
                image=IMAGE if self.config is PICTURES else None,
            )  # fmt: skip
            data, header = encode_episode_group(group)
            seq = await self.bus.publish(subjects.experience(JOB), data)
            sealed = SealedGroup(group.draw, "a", seq, header.digest, number - 1, number - 1, header.rewards, 8, "w")
            groups.append(msgspec.structs.replace(sealed, objective=objective))
        fields: dict[str, Any] = {"number": number, "revision": 1, "start_version": number - 1, "groups": groups}
        await self._write(BatchSealed(**self._stamp, **fields, update_index=number - 1))
        manifest = BatchManifest(**fields, update_index=number - 1)
        await self.bus.publish(subjects.batches(JOB), pack(manifest, job=JOB, id=f"{number}.1", epoch=1))

    async def answer(self, data: bytes) -> bytes:
        """Record and acknowledge a report of the trainer."""
        report, _ = unpack(data, Report)
        start: dict[str, Any] = {}
        match report.kind:
            case "hello":
                start = self._start()
            case "trained":
                event = BatchTrained(
                    **self._stamp, number=report.batch, revision=report.revision, version=report.version,
                    digest=report.digest, trainer_epoch=report.epoch, metrics=report.metrics,
                )  # fmt: skip
                await self._write(event)
                self.trained.append(event)
            case "checkpointed":
                stored = Checkpointed(
                    **self._stamp, number=report.batch, version=report.version, digest=report.digest,
                    path=report.path, trainer_epoch=report.epoch, low_seq=0,
                )  # fmt: skip
                await self._write(stored)
                self.checkpoints.append(stored)
            case "failed" | "halted" | "refused":
                self.failures.append(report.reason)
            case "forked":
                self.forks += 1
        return pack(Ack(ok=True, data=start), job=JOB, epoch=1)

    def _start(self) -> dict[str, Any]:
        saved = self.checkpoints[-1] if self.checkpoints else None
        after = saved.number if saved else 0
        return {
            "checkpoint": None if saved is None else {"number": saved.number, "path": saved.path},
            "last_trained": len(self.trained), "version": len(self.trained), "environment": self.environment,
            "digest": self.trained[-1].digest if self.trained else "",
            "batches": [[e.number, e.revision, e.version, e.digest] for e in self.trained if e.number > after],
        }  # fmt: skip

    async def _write(self, event: Event) -> None:
        await self.bus.publish(subjects.ledger(JOB), encode_events([event]))

    @property
    def _stamp(self) -> dict[str, Any]:
        return {"writer_epoch": 1, "time": time.time()}


@asynccontextmanager
async def trainer(bus: Bus, settings: ServiceSettings, leader: Leader) -> AsyncIterator[TrainerSession]:
    session = TrainerSession(bus, settings, JOB, leader.config)
    async with await bus.serve(subjects.report(JOB), leader.answer, max_concurrent=4):
        running = asyncio.create_task(session.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield session
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until_trained(leader: Leader, count: int) -> None:
    while len(leader.trained) < count:
        assert not leader.failures
        await asyncio.sleep(0.01)


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize("config", [PPO, SAC, PICTURES], ids=["ppo", "sac", "pictures"])
async def test_restarts_and_replays_give_the_digests_of_the_ledger(
    bus: Bus, tmp_path: Path, config: EmbodiedJob
) -> None:
    """A checkpoint follows batch 2, and a new trainer batch 3; a replay then starts from the first checkpoint."""
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path)
    leader = Leader(bus, config)
    await leader.begin()
    async with trainer(bus, settings, leader):
        for number in (1, 2):
            await leader.seal(number)
        await until_trained(leader, 2)
        command = pack(Command(kind="checkpoint", epoch=1, args={"reason": "interval"}), job=JOB, epoch=1)
        while [checkpoint.number for checkpoint in leader.checkpoints] != [0, 2]:
            await bus.request(subjects.command(JOB), command, deadline_s=30)  # ignored while one is being written
            await asyncio.sleep(0.05)
        await leader.seal(3)
        await until_trained(leader, 3)
    metrics = [event.metrics for event in leader.trained]
    assert all({"reward/mean", "success/rate", "episode/length"} <= each.keys() for each in metrics)
    assert metrics[1]["sequences/failed"] == 1
    if config is SAC:
        assert [each["critic/steps"] for each in metrics] == [0, 0, 2], "32 transitions in two batches are too few"
    async with trainer(bus, settings, leader) as session:
        await leader.seal(4)
        await until_trained(leader, 4)
        assert session.progress.version == 4
    assert leader.forks == 0
    assert len({event.digest for event in leader.trained}) == 4

    async def replay(from_batch: int | None, to_batch: int | None = None) -> tuple[list[tuple[int, bool]], ReplayRow]:
        rows: list[ReplayRow] = []
        request = f"replay_{from_batch}_{to_batch}"
        progress = await bus.subscribe(
            subjects.replay_progress(request), lambda _, data: rows.append(unpack(data, ReplayRow)[0])
        )
        await Replay(bus, settings, JOB, request).run(from_batch, to_batch)
        async with asyncio.timeout(30):
            while not rows or not rows[-1].done:
                await asyncio.sleep(0.01)
        await progress.close()
        *batches, done = rows
        return [(row.batch, row.match) for row in batches], done

    batches, done = await replay(1)
    assert (batches, done.ok) == ([(1, True), (2, True), (3, True), (4, True)], True), done.summary

    first, second = (
        checkpoint_path(tmp_path, checkpoint.path) / "model.safetensors" for checkpoint in leader.checkpoints
    )
    intact = second.read_bytes()
    damage(second)
    batches, done = await replay(3)
    assert batches == [(1, True), (2, True), (3, True), (4, True)], "the replay begins at the checkpoint before"
    assert done.ok
    second.write_bytes(intact)
    damage(first)
    batches, done = await replay(None)
    assert (batches, done.ok) == ([(3, True), (4, True)], True), "the replay begins at the next checkpoint"
    assert "2 of 2 updates after checkpoint 2" in done.summary
    assert "was changed after the checkpoint was written" in done.summary
    batches, done = await replay(None, 2)
    assert (batches, done.ok) == ([], False), "a replay of no update confirms nothing"
    damage(second)
    batches, done = await replay(None)
    assert (batches, done.ok) == ([], False)
    assert done.summary.startswith("no checkpoint is left")
    assert done.summary.count("was changed after the checkpoint was written") == 2


async def test_a_job_whose_simulator_the_policy_does_not_fit_fails_with_the_reason(bus: Bus, tmp_path: Path) -> None:
    leader = Leader(bus, job_of(policy={"observations": ["rgb"]}))
    await leader.begin()
    async with trainer(bus, ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), leader):
        while not leader.failures:
            await asyncio.sleep(0.01)
    assert "'rgb' is no observation of 'Reach'" in leader.failures[0]


async def test_a_replay_buffer_larger_than_the_memory_is_refused(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's cgroup allows 1 MiB; the buffer alone would fit, but not with the copy for a checkpoint."""
    (tmp_path / "slice" / "trainer").mkdir(parents=True)
    (tmp_path / "slice" / "memory.max").write_text(f"{1 << 20}\n")
    (tmp_path / "slice" / "trainer" / "memory.max").write_text("max\n")
    (tmp_path / "cgroup").write_text("0::/slice/trainer\n")
    monkeypatch.setattr(replay_buffer, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(replay_buffer, "CGROUP_MOUNT", tmp_path)
    row = 4 * (2 * 5 + 2 * CHUNK + 1) + 1  # of 'Reach': five observed numbers, two for each action
    most = (1 << 20) // (2 * row)
    for capacity, fits in ((most + 1, False), (most, True)):
        leader = Leader(bus, job_of({"buffer": {"capacity": capacity}}, {"type": "squashed"}))
        await leader.begin()
        async with trainer(bus, ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), leader):
            while not (leader.failures or leader.checkpoints):
                await asyncio.sleep(0.01)
        assert (len(leader.checkpoints), len(leader.failures)) == (int(fits), int(not fits)), leader.failures
        assert fits or leader.failures == [
            f"algorithm.buffer.capacity {capacity} needs {2 * capacity * row} bytes (the buffer, and the copy that a "
            f"checkpoint makes), and this trainer has {1 << 20} bytes of memory: at most {most} fit"
        ]


async def test_a_checkpoint_of_another_simulator_fails_the_job_and_stays(bus: Bus, tmp_path: Path) -> None:
    """The restarted trainer is told of a simulator with more numbers than the one that the checkpoint was made with."""
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path)
    leader = Leader(bus, PPO)
    await leader.begin()
    async with trainer(bus, settings, leader):
        await leader.seal(1)
        await until_trained(leader, 1)
        while not leader.checkpoints:
            await asyncio.sleep(0.01)
    folder = checkpoint_path(tmp_path, leader.checkpoints[0].path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    own = leader.environment
    leader.environment = {**own, "observations": {**own["observations"], "state": ((4,), "float64")}}
    async with trainer(bus, settings, leader):
        while not leader.failures:
            await asyncio.sleep(0.01)
    assert leader.failures == [
        "the checkpoint's observation 'state' is [[3], 'float64'], this job's is [[4], 'float64']"
    ]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    leader.environment, leader.failures = own, []
    async with trainer(bus, settings, leader):
        await leader.seal(2)
        await until_trained(leader, 2)
