"""A trainer's session: the faults that it survives, and the resources that it frees."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.policy import PolicyFollower
from penstock.services.trainer.fence import Fence
from penstock.services.trainer.publishing import Publishing
from penstock.services.trainer.rank_group import RankGroup
from penstock.services.trainer.ranks.heartbeats import Threads
from penstock.services.trainer.replica import Replica
from penstock.services.trainer.reports import Reporter
from penstock.services.trainer.session import TrainerSession, is_wanted
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.events import SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ack, BatchManifest, Command, Report
from penstock.shared.protocol.trajectory import Group, encode_group
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer
from penstock.shared.weights import open_receiver

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


@pytest.mark.long
async def test_the_models_of_an_earlier_start_are_freed(bus: Bus, tmp_path: Path) -> None:
    threads = Threads()
    replica = Replica(bus, JOB, CONFIG, world=None, threads=threads, checkpoints=tmp_path)
    rank_group = RankGroup(replica, None)
    publishing = Publishing(bus, ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), JOB)
    await rank_group.open()
    first = weakref.ref(replica.learner)
    await publishing.publish(rank_group, version=0, epoch=1)
    await rank_group.close()
    gc.collect()
    assert first() is None
    await rank_group.open()
    assert (await publishing.publish(rank_group, version=0, epoch=2)).base == ""
    publishing.close()
    threads.close()


async def test_a_halted_job_waits_for_a_bus_that_is_away(nats_server: NatsServer, tmp_path: Path) -> None:
    async with await Bus.connect(nats_server.url, name="test") as bus:
        await bus.wait_connected(5)
    assert not await is_wanted(bus, JOB)


def session_of(bus: Bus, directory: Path, weight_disk: Path | None = None) -> TrainerSession:
    settings = ServiceSettings(data_dir=directory, shm_dir=directory, weight_disk=weight_disk)
    return TrainerSession(bus, settings, JOB, CONFIG)


async def test_commands_of_a_fenced_coordinator_are_refused(bus: Bus, tmp_path: Path) -> None:
    session = session_of(bus, tmp_path)

    async def asked(epoch: int) -> Ack:
        command = Command(kind="rollback", epoch=epoch, args={"version": 0, "reason": f"epoch {epoch}"})
        return unpack(await session._on_command(pack(command, job=JOB, epoch=epoch)), Ack)[0]

    assert (await asked(4)).ok
    assert session._going_back == "epoch 4"
    session._going_back = ""
    refused = await asked(3)
    assert not refused.ok
    assert "epoch 3 is over" in refused.reason
    assert not session._going_back, "no trainer rolls back for a leader that lost its lease"
    assert (await asked(4)).ok
    assert (await asked(5)).ok
    assert session._going_back == "epoch 5"


@asynccontextmanager
async def coordinator(bus: Bus, *epochs: int) -> AsyncIterator[None]:
    """Answer each report with the next of ``epochs`` as the leader's epoch; the last epoch repeats."""
    left = list(epochs)

    async def answer(data: bytes) -> bytes:
        epoch = left.pop(0) if len(left) > 1 else left[0]
        return pack(Ack(ok=True, data={"epoch": epoch}), job=JOB, epoch=epoch)

    async with await bus.serve(subjects.report(JOB), answer):
        yield


async def test_a_report_answered_by_a_fenced_coordinator_goes_to_its_successor(bus: Bus) -> None:
    reporter = Reporter(bus, JOB, Fence())
    async with coordinator(bus, 2, 1, 1, 3), asyncio.timeout(30):
        assert (await reporter.ask(Report(kind="hello", epoch=1)))["epoch"] == 2
        assert (await reporter.ask(Report(kind="hello", epoch=1)))["epoch"] == 3


@pytest.mark.long
async def test_the_age_of_an_unanswered_report_grows(bus: Bus, tmp_path: Path) -> None:
    session = session_of(bus, tmp_path)
    began = time.time()
    asking = asyncio.create_task(session._reporter.ask(Report(kind="hello", epoch=1)))
    seen = []
    async with asyncio.timeout(30):
        while len(seen) < 2:
            row = session.status()
            if "waiting_for" in row:
                seen.append(row["since"])
            await asyncio.sleep(0.4)  # as between two heartbeats
    assert seen[0] == seen[1] == pytest.approx(began, abs=0.3)
    asking.cancel()


async def test_a_trainer_whose_start_failed_reports_what_it_waits_for(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(self: RankGroup, simulator: object) -> None:
        raise ConfigError("model.path: no such model")

    monkeypatch.setattr(RankGroup, "open", no_room)
    session = session_of(bus, tmp_path)

    async def answer(data: bytes) -> bytes:
        return pack(Ack(ok=True, data={"checkpoint": None, "last_trained": 0}), job=JOB, epoch=1)

    async with await bus.serve(subjects.report(JOB), answer):
        running = asyncio.create_task(session.run())
        async with asyncio.timeout(30):
            while "end this job" not in (row := session.status()).get("waiting_for", ""):
                await asyncio.sleep(0.02)
        assert "model.path: no such model" in row["waiting_for"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@dataclass
class Leader:
    """Records a trainer's reports; answers ``trained`` once ``recorded`` is set, and accepts it if ``accepts``."""

    bus: Bus
    accepts: bool = True
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    reports: list[Report] = field(default_factory=list)

    async def answer(self, data: bytes) -> bytes:
        report, _ = unpack(data, Report)
        if report.kind == "trained":
            await self.recorded.wait()
        self.reports.append(report)
        start = {"checkpoint": None, "last_trained": 0, "version": 0, "digest": "", "batches": []}
        return pack(Ack(ok=self.accepts or report.kind != "trained", reason="no", data=start), job=JOB, epoch=1)

    def count(self, kind: str) -> int:
        return sum(report.kind == kind for report in self.reports)

    async def shown(self) -> tuple[int, str] | None:
        """Return version and digest of the announced weights, or None."""
        entry = await self.bus.kv(subjects.MANIFESTS).get(JOB)
        if entry is None or entry.value is None:
            return None
        manifest, _ = unpack(entry.value, WeightManifest)
        return manifest.version, manifest.digest

    async def seal(self, version: int = 0) -> None:
        """Publish batch 1, with one group of version ``version``, from which its training starts."""
        ids = np.asarray([3, 4], np.int32)
        group = Group(
            job=JOB, draw=Draw(0), attempt="a", epoch=1, prompt_ids=ids, token_ids=ids,
            cu_seqlens=np.arange(3, dtype=np.int32), logprobs=np.full(2, -1, np.float32), mask=np.ones(2, np.uint8),
            rewards=np.asarray([0, 1], np.float32), failed=np.zeros(2, np.bool_), finish=np.zeros(2, np.uint8),
            spans=np.asarray([[i, version, 0, 1] for i in range(2)], np.int32),
        )  # fmt: skip
        data, header = encode_group(group)
        seq = await self.bus.publish(subjects.experience(JOB), data)
        sealed = SealedGroup(Draw(0), "a", seq, header.digest, version, version, [0.0, 1.0], 2, "w", temperature=1.0)
        manifest = BatchManifest(number=1, revision=1, start_version=version, update_index=0, groups=[sealed])
        await self.bus.publish(subjects.batches(JOB), pack(manifest, job=JOB, id="1.1", epoch=1))


@asynccontextmanager
async def training(
    bus: Bus, directory: Path, leader: Leader, weight_disk: Path | None = None
) -> AsyncIterator[TrainerSession]:
    """Run a session until it has trained batch 1 and reports it."""
    await leader.seal()
    session = session_of(bus, directory, weight_disk)
    async with await bus.serve(subjects.report(JOB), leader.answer, max_concurrent=4):
        running = asyncio.create_task(session.run())
        try:
            async with asyncio.timeout(60):
                while session.progress.digest == "" or session.progress.batch != 1:
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.01)
            yield session
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_weights_are_announced_once_their_update_is_recorded(bus: Bus, tmp_path: Path) -> None:
    leader = Leader(bus)
    async with training(bus, tmp_path, leader) as session, asyncio.timeout(60):
        first = await leader.shown()
        assert first is not None
        assert first[0] == 0
        await asyncio.sleep(0.3)  # enough time for an announcement that does not wait for the ledger
        assert await leader.shown() == first, "the ledger does not know of version 1 yet"
        leader.recorded.set()
        while await leader.shown() == first:
            await asyncio.sleep(0.01)
        assert leader.count("trained") == 1
        assert await leader.shown() == (1, session.progress.digest)


async def test_an_update_that_the_ledger_refuses_is_never_shown_to_engines(bus: Bus, tmp_path: Path) -> None:
    leader = Leader(bus, accepts=False)
    leader.recorded.set()
    async with training(bus, tmp_path, leader), asyncio.timeout(60):
        while leader.count("hello") < 2:
            await asyncio.sleep(0.01)
        assert leader.count("trained") == 1
        shown = await leader.shown()
        assert shown is not None
        assert shown[0] == 0, "the trainer started anew instead"


async def test_a_batch_that_starts_from_another_version_is_not_trained(bus: Bus, tmp_path: Path) -> None:
    """The coordinator knows an update that this trainer lacks, so the trainer asks again where to start."""
    leader = Leader(bus)
    leader.recorded.set()
    await leader.seal(version=1)
    session = session_of(bus, tmp_path)
    async with await bus.serve(subjects.report(JOB), leader.answer, max_concurrent=4):
        running = asyncio.create_task(session.run())
        async with asyncio.timeout(60):
            while leader.count("hello") < 2:
                assert not leader.count("trained")
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not leader.count("trained")


def remove_segments(directory: Path) -> None:
    for segment in directory.glob("penstock-weights-*"):
        segment.unlink()


@pytest.mark.long
async def test_weights_whose_segment_is_gone_are_published_again_for_a_new_worker(bus: Bus, tmp_path: Path) -> None:
    """The slot was removed while no worker ran; the trainer waits for a batch that needs workers."""
    leader = Leader(bus)
    leader.recorded.set()
    async with training(bus, tmp_path, leader) as session, asyncio.timeout(90):
        while await leader.shown() != (1, session.progress.digest):
            await asyncio.sleep(0.01)
        remove_segments(tmp_path)
        settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path)
        engine = open_engine(CONFIG.model, build_tokenizer(CONFIG.model), max_running=2, seed=0, device="cpu")
        await engine.start()
        follower = PolicyFollower(bus, settings, JOB, engine)
        following = asyncio.create_task(follower.run())
        await follower.first()
        assert (follower.version, follower.digest) == (1, session.progress.digest)
        assert leader.count("hello") == 1, "the trainer continues without a restart"
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.mark.long
async def test_a_version_is_also_written_to_a_shared_directory_that_comes_later(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers have the version meanwhile. No later one comes if all others wait for the directory."""
    monkeypatch.setattr("penstock.services.trainer.session.COMPLETE_S", 0.05)
    leader, disk = Leader(bus), tmp_path / "disk"
    leader.recorded.set()
    async with training(bus, tmp_path, leader, disk) as session, asyncio.timeout(60):
        while await leader.shown() != (1, session.progress.digest):
            await asyncio.sleep(0.01)
        problem = str(session.status()["problem"])
        assert "cannot write version 1" in problem
        assert "PENSTOCK_WEIGHT_DISK" in problem
        disk.mkdir()
        while "problem" in session.status():
            await asyncio.sleep(0.01)
        far = open_receiver(ServiceSettings(host_id="far", data_dir=tmp_path, shm_dir=tmp_path, weight_disk=disk))
        while True:
            entry = await bus.kv(subjects.MANIFESTS).get(JOB)
            assert entry is not None
            assert entry.value is not None
            manifest, _ = unpack(entry.value, WeightManifest)
            if len(manifest.refs) == 2:
                break
            await asyncio.sleep(0.01)
        assert (manifest.version, manifest.digest) == (1, session.progress.digest)
        assert far.stage(manifest).way.transport == "disk"
        assert leader.count("hello") == 1, "the trainer continues without a restart"


@pytest.mark.long
async def test_a_version_is_announced_although_nats_dies_after_its_publication(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of version 1 are in their slot and its update is recorded when the server is killed."""
    announce, dead = Publishing.announce, asyncio.Event()

    async def kill_and_announce(self: Publishing, manifest: WeightManifest) -> None:
        if manifest.version == 1 and not dead.is_set():
            nats_server.kill()
            dead.set()
        await announce(self, manifest)

    monkeypatch.setattr(Publishing, "announce", kill_and_announce)
    leader = Leader(bus)
    leader.recorded.set()
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path)
    engine = open_engine(CONFIG.model, build_tokenizer(CONFIG.model), max_running=2, seed=0, device="cpu")
    await engine.start()
    follower = PolicyFollower(bus, settings, JOB, engine)
    following = asyncio.create_task(follower.run())
    async with training(bus, tmp_path, leader) as session, asyncio.timeout(90):
        await follower.first()
        served = (follower.version, follower.digest)
        assert served[0] == 0
        await dead.wait()
        await asyncio.sleep(0.5)  # enough time to serve a version that nobody announced
        assert (follower.version, follower.digest) == served
        await asyncio.to_thread(nats_server.start)
        while follower.version == 0:
            await asyncio.sleep(0.01)
        assert (follower.version, follower.digest) == (1, session.progress.digest)
        assert await leader.shown() == (1, session.progress.digest)
        assert (leader.count("trained"), leader.count("hello")) == (1, 1), "the trainer continues without a restart"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await engine.close()
