"""A worker's engine follows the versions that a trainer announces, and releases them when the job ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.leader.weight_routes import WeightRouter, transports_of
from penstock.services.coordinator.leader.why import worker_waits
from penstock.services.rollout.commit_rule import Attempt, CommitRule
from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.policy import PolicyFollower
from penstock.services.rollout.service import RolloutService
from penstock.services.trainer.publishing import Publishing
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.rollout import EmbeddedConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.jobs import JobRecord, JobStatus
from penstock.shared.protocol.messages import Ack, Heartbeat
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.transport.bulk_segment import LockedFile
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import cleanup, layout_of, open_publisher
from penstock.shared.weights.disk import remove_files
from penstock.shared.weights.open import Publisher
from penstock.shared.weights.pinned import PinnedCopies
from penstock.shared.weights.slots import slot_paths
from tests.contract.device_memories import FileMemory, LateStream

JOB = "job_follow"
MODEL = ModelConfig.model_validate(
    {"config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}, "tokenizer": "char"}
)


class Trainer:
    """Trainer that publishes the weights of a seed under any version and epoch."""

    def __init__(self, bus: Bus, settings: ServiceSettings, names: dict[str, Tensor]) -> None:
        self.bus, self.settings, self.names = bus, settings, names
        self.publishers: dict[int, Publisher] = {}
        self.memory: FileMemory | None = None

    def publish(self, version: int, *, epoch: int) -> WeightManifest:
        if epoch not in self.publishers:
            layout = layout_of(self.names.items())
            self.publishers[epoch] = open_publisher(JOB, layout, self.settings, memory=self.memory)
        filled = [(name, torch.full_like(tensor, version + epoch / 10)) for name, tensor in self.names.items()]
        return self.publishers[epoch].publish(filled, version=version, epoch=epoch)

    async def announce(self, manifest: WeightManifest) -> None:
        await self.bus.kv(subjects.MANIFESTS).put(JOB, pack(manifest, job=JOB, id="m", epoch=manifest.epoch))

    async def show(self, version: int, *, epoch: int) -> WeightManifest:
        manifest = self.publish(version, epoch=epoch)
        await self.announce(manifest)
        return manifest

    def close(self) -> None:
        for publisher in self.publishers.values():
            publisher.close()


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[ServiceSettings]:
    (tmp_path / "shm").mkdir()
    yield ServiceSettings(shm_dir=tmp_path / "shm", data_dir=tmp_path)


@asynccontextmanager
async def following(
    bus: Bus, settings: ServiceSettings, rule: CommitRule | None = None, trainer_settings: ServiceSettings | None = None
) -> AsyncIterator[tuple[PolicyFollower, Trainer]]:
    tokenizer = build_tokenizer(MODEL)
    engine = open_engine(MODEL, tokenizer, max_running=2, seed=0, device="cpu")
    names = {name: tensor.detach().clone() for name, tensor in engine._policy_parameters().items()}  # type: ignore[attr-defined]
    await engine.start()
    hooks: dict[str, Any] = {} if rule is None else {"leaving": rule.interrupt, "updating": rule.update}
    follower = PolicyFollower(bus, settings, JOB, engine, **hooks)
    trainer = Trainer(bus, trainer_settings or settings, names)
    task = asyncio.create_task(follower.run())
    try:
        yield follower, trainer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()
        trainer.close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Run without garbage collection: memory must be freed without it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mapped(settings: ServiceSettings) -> list[str]:
    """Return the slots that this process maps or has open, also those whose files are deleted."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [line for line in maps + files if str(settings.shm_dir) in line]


async def reach(follower: PolicyFollower, version: int, epoch: int) -> None:
    async with asyncio.timeout(60):
        while (follower.version, follower.epoch) != (version, epoch):
            await asyncio.sleep(0.01)


async def test_a_version_of_a_fenced_trainer_is_not_staged(
    bus: Bus, settings: ServiceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """The follower refuses a late manifest of a fenced trainer by its epoch, though its version is higher."""
    async with following(bus, settings) as (follower, trainer):
        late = trainer.publish(7, epoch=1)
        await trainer.show(1, epoch=2)
        await reach(follower, 1, 2)
        with caplog.at_level(logging.WARNING):
            await trainer.announce(late)
            await asyncio.sleep(0.3)
            await trainer.show(2, epoch=2)
            await reach(follower, 2, 2)
        assert not [record for record in caplog.records if "not staged" in record.getMessage()]


class Aborted:
    """Engine for a commit rule that records the requests to abort."""

    def __init__(self) -> None:
        self.calls: list[set[str]] = []

    async def abort(self, request_ids: set[str]) -> int:
        self.calls.append(set(request_ids))
        return len(request_ids)


@pytest.mark.long
async def test_groups_begin_again_once_for_a_version_and_only_if_it_can_be_loaded(
    bus: Bus, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted, attempt = Aborted(), Attempt()
    rule = CommitRule(EmbeddedConfig(on_update="restart"), aborted)  # type: ignore[arg-type]
    attempt.requests["r0"] = 0
    rule.attempts.add(attempt)
    fails, seen = {"load_chunk": 2, "commit_update": 2}, list[tuple[str, int]]()
    async with following(bus, settings, rule) as (follower, trainer):

        def failing(name: str) -> Callable[..., Any]:
            real = getattr(follower._engine, name)

            async def call(*args: Any) -> Any:
                seen.append((name, len(aborted.calls)))
                if fails[name]:
                    fails[name] -= 1
                    raise WeightsError("not now")
                return await real(*args)

            return call

        for name in fails:
            monkeypatch.setattr(follower._engine, name, failing(name))
        await trainer.show(1, epoch=1)
        await reach(follower, 1, 1)
        assert seen == [
            ("load_chunk", 0), ("load_chunk", 0),
            ("load_chunk", 0), ("commit_update", 1), ("load_chunk", 1), ("commit_update", 1),
            ("load_chunk", 1), ("commit_update", 1),
        ]  # fmt: skip
        assert rule.is_open
        await trainer.show(2, epoch=1)
        await reach(follower, 2, 1)
    assert aborted.calls == [{"r0"}, {"r0"}]


async def test_weights_come_by_the_transport_that_the_coordinator_chose(bus: Bus, settings: ServiceSettings) -> None:
    served = settings.model_copy(update={"bulk_host": "127.0.0.1"})
    async with following(bus, served) as (follower, trainer):
        members, clock = Members(), time.monotonic()
        statuses = {"trainer": {"transports": ["shm", "tcp"]}, "rollout": follower.status()}
        for service, row in statuses.items():
            members.on_heartbeat(
                Heartbeat(
                    service=service, worker=served.worker_id, host=service, pid=1, started=0.0, interval_s=60.0,
                    health_port=0, ready=True, jobs={JOB: row},
                ),
                clock,
            )  # fmt: skip
        router = asyncio.create_task(WeightRouter(bus, JOB, members).follow())
        async with asyncio.timeout(30):
            while await bus.kv(subjects.MANIFESTS).get(subjects.weight_routes(JOB)) is None:
                await asyncio.sleep(0.02)
        router.cancel()
        manifest = await trainer.show(1, epoch=1)
        await reach(follower, 1, 1)
        row = follower.status()
        assert (row["transport"], row["fetched_bytes"]) == ("tcp", manifest.layout.nbytes)
        assert row["stage_s"] > 0
        routes = WeightRoutes(epoch=9, transports={served.worker_id: "shm"})
        key = subjects.weight_routes(JOB)
        await bus.kv(subjects.MANIFESTS).put(key, pack(routes, job=JOB, id=key))
        await trainer.show(2, epoch=1)
        await reach(follower, 2, 1)
        assert (follower.status()["transport"], follower.status()["fetched_bytes"]) == ("shm", 0)


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[ServiceSettings, ServiceSettings]:
    """Settings of a trainer and of a worker on another host, which have no network in common."""
    for name in ("a", "b", "disk"):
        tmp_path.joinpath(name).mkdir()
    trainer, worker = (ServiceSettings(host_id=name, worker_id=name, shm_dir=tmp_path / name) for name in ("a", "b"))
    return trainer, worker


def beating(follower: PolicyFollower, trainer: ServiceSettings, worker: ServiceSettings) -> Members:
    """Return what the coordinator learns from the heartbeats of both."""
    members, clock = Members(), time.monotonic()
    row = {"transports": Publishing(None, trainer, JOB).transports}  # type: ignore[arg-type]
    for service, settings, entry in (("trainer", trainer, row), ("rollout", worker, follower.status())):
        members.on_heartbeat(
            Heartbeat(
                service=service, worker=settings.worker_id, host=settings.host_id, pid=1, started=0.0, interval_s=60.0,
                health_port=0, ready=True, jobs={JOB: entry},
            ),
            clock,
        )  # fmt: skip
    return members


async def test_weights_go_to_another_host_through_a_directory_that_both_share(
    bus: Bus, hosts: tuple[ServiceSettings, ServiceSettings], tmp_path: Path
) -> None:
    """The directory may have another path at the worker. Old versions are removed, and at the end all of them."""
    disk, mount = tmp_path / "disk", tmp_path / "mount"
    mount.symlink_to(disk)
    far, near = (one.model_copy(update={"weight_disk": path}) for one, path in zip(hosts, (disk, mount), strict=True))
    async with following(bus, near, trainer_settings=far) as (follower, trainer):
        router = asyncio.create_task(WeightRouter(bus, JOB, beating(follower, far, near)).follow())
        async with asyncio.timeout(30):
            while (entry := await bus.kv(subjects.MANIFESTS).get(subjects.weight_routes(JOB))) is None:
                await asyncio.sleep(0.02)
        router.cancel()
        assert entry.value is not None
        assert unpack(entry.value, WeightRoutes)[0].transports == {"b": "disk"}
        for version in range(1, 5):
            await trainer.show(version, epoch=1)
            await reach(follower, version, 1)
            assert follower.status()["transport"] == "disk"
            assert len(list(disk.rglob("*.*"))) <= 2
        parameters = follower._engine._policy_parameters().values()  # type: ignore[attr-defined]
        assert {round(float(tensor.detach().max()), 3) for tensor in parameters} == {4.1}
    cleanup(JOB, far)
    assert not list(disk.iterdir())


async def test_a_worker_that_no_transport_reaches_names_the_settings(
    bus: Bus, hosts: tuple[ServiceSettings, ServiceSettings]
) -> None:
    far, near = hosts
    async with following(bus, near, trainer_settings=far) as (follower, trainer):
        await trainer.show(1, epoch=1)
        async with asyncio.timeout(60):
            while "problem" not in follower.status():
                await asyncio.sleep(0.02)
        members, clock = beating(follower, far, near), time.monotonic()
        assert transports_of(JOB, members, clock) == {}, "no transport is promised to it"
        (row,) = [row for row in members.rows(JOB, clock) if row["worker"] == "b"]
        (wait,) = worker_waits(JOB, members, clock, time.time(), ("trainer", "rollout"))
        for text in (row["problem"], wait["waiting_for"]):
            assert "PENSTOCK_BULK_HOST at the trainer" in text
            assert "PENSTOCK_WEIGHT_DISK at trainer and worker" in text
            assert "shm on host 'a'" in text
        assert follower.version == -1


@asynccontextmanager
async def asked(bus: Bus) -> AsyncIterator[list[tuple[float, WeightManifest]]]:
    """Answer requests to publish again, as a trainer does, and record them with their times."""
    requests: list[tuple[float, WeightManifest]] = []

    async def answer(data: bytes) -> bytes:
        requests.append((time.monotonic(), unpack(data, WeightManifest)[0]))
        return pack(Ack(ok=True), job=JOB)

    server = await bus.serve(subjects.lost_weights(JOB), answer)
    try:
        yield requests
    finally:
        await server.close(0.5)


def attempts(follower: PolicyFollower) -> list[float]:
    """Return a list that gets the time of each later attempt to stage a version."""
    times, stage = list[float](), follower._receiver.stage

    def timed(manifest: WeightManifest) -> Any:
        times.append(time.monotonic())
        return stage(manifest)

    follower._receiver.stage = timed  # type: ignore[method-assign]
    return times


@pytest.mark.parametrize("mount", ["missing", "elsewhere", "broken"])
async def test_a_version_that_a_worker_cannot_read_is_not_soon_asked_for(
    bus: Bus,
    hosts: tuple[ServiceSettings, ServiceSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mount: str,
) -> None:
    """The shared directory is not the trainer's on this host, or cannot be read. The worker tries ever more rarely, and
    needs no new version once the directory is right."""
    monkeypatch.setattr("penstock.services.rollout.policy.RETRY_S", 0.01)
    monkeypatch.setattr("penstock.services.rollout.policy.UNREADABLE_S", (0.02, 0.3))
    right, wrong, way = tmp_path / "disk", tmp_path / "wrong", tmp_path / "way"
    if mount != "missing":
        wrong.mkdir()
    if mount == "broken":  # a link to itself: an error that even root gets
        wrong.joinpath("job_follow").symlink_to("job_follow")
    way.symlink_to(wrong)
    far, near = (one.model_copy(update={"weight_disk": path}) for one, path in zip(hosts, (right, way), strict=True))
    async with asked(bus) as requests, following(bus, near, trainer_settings=far) as (follower, trainer):
        times = attempts(follower)
        await trainer.show(1, epoch=1)
        async with asyncio.timeout(60):
            while len(times) < 7:
                await asyncio.sleep(0.01)
        assert requests == []
        gaps = [after - before for before, after in pairwise(times)]
        assert all(gap >= wait for gap, wait in zip(gaps, (0.02, 0.04, 0.08, 0.16, 0.3, 0.3), strict=True)), gaps
        members, clock = beating(follower, far, near), time.monotonic()
        (wait,) = worker_waits(JOB, members, clock, time.time(), ("trainer", "rollout"))
        assert "PENSTOCK_WEIGHT_DISK must be the trainer's directory" in wait["waiting_for"]
        way.unlink()
        way.symlink_to(right)
        await reach(follower, 1, 1)
        assert (follower.status()["transport"], requests) == ("disk", [])


async def until_asked(requests: list[tuple[float, WeightManifest]], times: int, lost: WeightManifest) -> None:
    """Wait until the trainer was asked ``times`` times; check that it was asked for ``lost`` alone."""
    async with asyncio.timeout(60):
        while len(requests) < times:
            await asyncio.sleep(0.01)
    assert {(one.version, one.digest) for _, one in requests} == {(lost.version, lost.digest)}


async def test_a_version_that_stays_unreadable_is_asked_for_in_the_end(
    bus: Bus, hosts: tuple[ServiceSettings, ServiceSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of the job was removed from the share: only the trainer can make it again."""
    monkeypatch.setattr("penstock.services.rollout.policy.RETRY_S", 0.01)
    monkeypatch.setattr("penstock.services.rollout.policy.UNREADABLE_S", (0.02, 0.1))
    monkeypatch.setattr("penstock.services.rollout.policy.UNREADABLE_ASK_S", (0.2, 0.4))
    far, near = (one.model_copy(update={"weight_disk": tmp_path}) for one in hosts)
    async with asked(bus) as requests, following(bus, near, trainer_settings=far) as (follower, trainer):
        lost = trainer.publish(1, epoch=1)
        remove_files(far, JOB)
        await trainer.announce(lost)
        await until_asked(requests, 2, lost)
        await trainer.show(1, epoch=1)
        await reach(follower, 1, 1)


async def test_a_version_whose_slots_were_removed_is_asked_for_ever_more_rarely(
    bus: Bus, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.services.rollout.policy.RETRY_S", 0.01)
    monkeypatch.setattr("penstock.services.rollout.policy.ASK_DEADLINE_S", 60.0)
    async with asked(bus) as requests, following(bus, settings) as (follower, trainer):
        times = attempts(follower)
        lost = trainer.publish(1, epoch=1)
        cleanup(JOB, settings)
        await trainer.announce(lost)
        await until_asked(requests, 3, lost)
        assert [sum(each < at for each in times) for at, _ in requests[:3]] == [4, 4 + 8, 4 + 8 + 16]
        await trainer.show(1, epoch=1)
        await reach(follower, 1, 1)


async def test_the_newest_version_is_loaded_after_a_wait_for_groups(bus: Bus, settings: ServiceSettings) -> None:
    begun, ended, blocks = asyncio.Event(), asyncio.Event(), 0

    @asynccontextmanager
    async def waiting(version: int, digest: str) -> AsyncIterator[bool]:
        nonlocal blocks
        begun.set()
        await ended.wait()
        yield True
        blocks += 1

    async with following(bus, settings) as (follower, trainer):
        follower._updating = waiting
        await trainer.show(1, epoch=1)
        await asyncio.wait_for(begun.wait(), 60)
        await trainer.show(2, epoch=1)
        assert (follower.version, follower.way) == (-1, None), "nothing is staged meanwhile"
        ended.set()
        await asyncio.wait_for(follower.first(), 60)
        assert follower.version == 2, "the version that was replaced meanwhile is not loaded"
        await trainer.show(3, epoch=1)
        await reach(follower, 3, 1)
    assert blocks == 2


async def test_weights_come_from_the_trainers_gpu(
    bus: Bus, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file stands for the GPU's memory; the engine keeps its copy after the trainer has ended."""
    tmp_path.joinpath("device").mkdir()
    memory = FileMemory(tmp_path / "device")
    monkeypatch.setattr("penstock.services.rollout.policy.device_memory", lambda settings: memory)
    async with following(bus, settings) as (follower, trainer):
        trainer.memory = memory
        for version in range(4):
            await trainer.show(version, epoch=1)
            await reach(follower, version, 1)
            row = follower.status()
            assert (row["transports"][0], row["devices"], row["transport"]) == ("cuda_ipc", ("GPU-0",), "cuda_ipc")
        trainer.close()
        parameters = follower._engine._policy_parameters().values()  # type: ignore[attr-defined]
        assert {round(float(tensor.detach().max()), 3) for tensor in parameters} == {3.1}


@pytest.mark.usefixtures("no_collector")
async def test_no_slot_stays_mapped_once_a_worker_stops(bus: Bus, settings: ServiceSettings) -> None:
    """The test still refers to the follower and its engine, as an uncollected reference cycle would."""
    async with following(bus, settings) as (follower, trainer):
        for version in range(3):
            await trainer.show(version, epoch=1)
            await reach(follower, version, 1)
        assert mapped(settings)
    cleanup(JOB, settings)
    assert not mapped(settings)


async def test_a_version_staged_too_late_is_released(bus: Bus, settings: ServiceSettings) -> None:
    """The thread that verifies a version cannot be cancelled, so it must release its lock when it is done."""
    begun, goes_on, staged = threading.Event(), threading.Event(), threading.Event()
    async with following(bus, settings) as (follower, trainer):
        stage = follower._receiver.stage

        def slowly(manifest: WeightManifest) -> Any:
            begun.set()
            assert goes_on.wait(60)
            try:
                return stage(manifest)
            finally:
                staged.set()

        follower._receiver.stage = slowly  # type: ignore[method-assign]
        await trainer.show(0, epoch=1)
        assert await asyncio.to_thread(begun.wait, 60)
    goes_on.set()
    assert await asyncio.to_thread(staged.wait, 60)
    async with asyncio.timeout(60):
        while mapped(settings):
            await asyncio.sleep(0.01)
    slots = [LockedFile.open(path) for path in slot_paths(settings.shm_dir, JOB)]
    assert slots
    assert all(slot.try_exclusive() for slot in slots)


@pytest.mark.usefixtures("no_collector")
async def test_a_worker_that_stops_while_weights_are_copied_keeps_their_slot_locked(
    bus: Bus, settings: ServiceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream reads the slot until its last copy: a publisher must not write to it before."""
    stream, begun, goes_on = LateStream(), threading.Event(), threading.Event()
    goes_on.set()

    def wait() -> None:
        begun.set()
        assert goes_on.wait(60)

    def locked() -> bool:
        slots = [LockedFile.open(path) for path in slot_paths(settings.shm_dir, JOB)]
        grants = [slot.try_exclusive() for slot in slots]
        for slot in slots:
            slot.close()
        return grants.count(False) == 2

    async with following(bus, settings) as (follower, trainer):
        engine: Any = follower._engine
        engine._copies = PinnedCopies(stream, buffer_bytes=1024)
        await trainer.show(1, epoch=1)
        await reach(follower, 1, 1)
        assert all(bool((tensor == 1.1).all()) for tensor in engine._policy_parameters().values())
        stream.waiting = wait
        goes_on.clear()
        await trainer.show(2, epoch=1)
        assert await asyncio.to_thread(begun.wait, 60)

        async def observe() -> bool:
            try:
                async with asyncio.timeout(60):
                    while not engine._served.update.given_up:  # the follower is cancelled meanwhile
                        await asyncio.sleep(0.001)
                return locked()
            finally:
                goes_on.set()

        observing = asyncio.create_task(observe())
    assert await observing, "one slot is served, from the other one weights are being copied"
    assert (stream.queued, follower.version) == (0, 1)
    assert not mapped(settings), "an error that refers to the tensors was kept"
    gc.collect()
    assert "never retrieved" not in caplog.text


async def keep(bus: Bus, phase: str) -> None:
    spec = {
        "name": "follow", "model": MODEL.model_dump(exclude_unset=True), "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]}, "algorithm": {"group_size": 4},
        "train": {"batch_size": 8, "max_updates": 3},
    }  # fmt: skip
    record = JobRecord(
        id=JOB,
        name="follow",
        created_at=datetime.now(UTC),
        spec=spec,
        status=JobStatus.model_validate({"phase": phase}),
    )
    await bus.kv(subjects.JOBS).put(JOB, record.model_dump_json().encode())


@pytest.mark.long
@pytest.mark.usefixtures("no_collector")
async def test_a_finished_job_leaves_no_slot_mapped_in_its_worker(bus: Bus, settings: ServiceSettings) -> None:
    """Earlier, five short jobs took a worker from 266 MiB to 3.0 GiB, mostly in slots without a file name."""
    engine = open_engine(MODEL, build_tokenizer(MODEL), max_running=2, seed=0, device="cpu")
    names = {name: tensor.detach().clone() for name, tensor in engine._policy_parameters().items()}  # type: ignore[attr-defined]
    await engine.close()
    service, trainer = RolloutService(bus, settings), Trainer(bus, settings, names)
    running = asyncio.create_task(service.run())
    try:
        async with asyncio.timeout(60):
            await keep(bus, "running")
            for version in range(3):
                await trainer.show(version, epoch=1)
                while service.status().get(JOB, {}).get("version") != version:
                    await asyncio.sleep(0.01)
            trainer.close()
            cleanup(JOB, settings)
            assert mapped(settings), "the worker serves the last version"
            await keep(bus, "succeeded")
            while mapped(settings) or service.sessions:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
