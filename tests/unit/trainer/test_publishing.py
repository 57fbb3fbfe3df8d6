"""Publishing of versions: failures name their reason, and announcements stay in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.publishing import Publishing
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Fenced, WeightsError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes, make_layout
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.server import NatsServer
from penstock.shared.weights import cleanup, open_receiver
from tests.contract.device_memories import FileMemory


class Left(Learner):
    """A learner one of whose ranks dies while they gather the weights."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        def gathered() -> Iterator[Tensor]:
            whole = super(Left, self).weights()
            yield next(whole)[1]
            raise RuntimeError("Connection closed by peer")

        return zip([name for name, _, _ in self._policy.layout()], gathered(), strict=True)


def test_a_rank_that_is_lost_while_writing_is_the_reason(make_config: Callable[..., JobConfig], tmp_path: Path) -> None:
    """The error names the lost connection, not that there is nothing more to gather."""
    publishing = Publishing(None, ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), "job_1")  # type: ignore[arg-type]
    try:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            publishing._write(0, 1, None, WeightRoutes(epoch=0, transports={}), Left(make_config()))
    finally:
        publishing.close()


class Stopped(Learner):
    """A learner whose session is stopped while its weights are being written."""

    closing: threading.Thread

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        whole = super().weights()
        yield next(whole)
        self.closing.start()
        self.closing.join(0.5)
        assert self.closing.is_alive(), "closing waits for this thread"
        yield from whole


def test_a_publisher_is_closed_behind_the_thread_that_writes(
    make_config: Callable[..., JobConfig], tmp_path: Path
) -> None:
    settings, routes = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path), WeightRoutes(epoch=0, transports={})
    publishing, learner = Publishing(None, settings, "job_1"), Stopped(make_config())  # type: ignore[arg-type]
    learner.closing = threading.Thread(target=publishing.close)
    assert publishing._write(0, 1, None, routes, learner).version == 0
    learner.closing.join(30)
    with pytest.raises(WeightsError, match="no longer publishes weights of job 'job_1'"):
        publishing._write(1, 1, None, routes, Learner(make_config()))


def test_the_trainer_names_the_gpu_that_it_publishes_in(
    make_config: Callable[..., JobConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("device").mkdir()
    memory = FileMemory(tmp_path / "device")
    monkeypatch.setattr("penstock.services.trainer.publishing.device_memory", lambda settings: memory)
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path)
    publishing = Publishing(None, settings, "job_1")  # type: ignore[arg-type]
    assert (publishing.transports, publishing.devices) == (["shm"], ())
    published = publishing._write(0, 1, None, WeightRoutes(epoch=0, transports={}), Learner(make_config()))
    assert (publishing.transports, publishing.devices) == (["cuda_ipc", "shm"], ("GPU-0",))
    assert open_receiver(settings, memory=memory).stage(published).way.transport == "cuda_ipc"
    publishing.close()
    cleanup("job_1", settings)
    assert not list(tmp_path.glob("penstock-*"))


def test_the_trainer_also_writes_files_if_it_has_a_directory_for_them(
    make_config: Callable[..., JobConfig], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = ServiceSettings(host_id="a", data_dir=tmp_path, shm_dir=tmp_path, weight_disk=disk)
    publishing, routes = Publishing(None, settings, "job_1"), WeightRoutes(epoch=0, transports={})  # type: ignore[arg-type]
    assert publishing.transports == ["shm", "disk"]
    for version in range(2):
        published = publishing._write(version, 1, None, routes, Learner(make_config()))
    assert [ref.transport for ref in published.refs] == ["shm", "disk"]
    assert open_receiver(settings).stage(published).way.transport == "shm"
    assert open_receiver(settings.model_copy(update={"host_id": "b"})).stage(published).way.transport == "disk"
    publishing.close()
    cleanup("job_1", settings)
    assert not list(disk.iterdir())


def manifest(version: int, epoch: int) -> WeightManifest:
    layout = make_layout([("w", "float32", (2,))])
    return WeightManifest(
        job="job_1", version=version, epoch=epoch, layout=layout, digest=f"d{epoch}.{version}", refs=(), created=0.0
    )


async def test_versions_that_are_announced_while_nats_dies_are_seen_in_order(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """NATS dies during an announcement; the trainer continues by itself, and each manifest has its own digest."""
    publishing, last = Publishing(bus, ServiceSettings(shm_dir=tmp_path), "job_1"), 120
    seen: list[tuple[int, str]] = []

    async def watch() -> None:
        async for entry in bus.kv(subjects.MANIFESTS).watch("job_1"):
            if entry.value is not None:
                found, _ = unpack(entry.value, WeightManifest)
                seen.append((found.version, found.digest))
            if seen and seen[-1][0] == last:
                return

    async def crash() -> None:
        while len(seen) < 20:
            await asyncio.sleep(0.001)
        nats_server.kill()
        await asyncio.sleep(0.3)
        nats_server.start()

    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        crashing = tasks.create_task(crash())
        for version in range(1, last + 1):
            if version == last:
                await crashing
            await publishing.announce(manifest(version, 1))
    assert bus.reconnects == 1
    versions = [version for version, _ in seen]
    assert versions == sorted(set(versions))
    assert versions[-1] == await publishing.newest() == last
    assert all(digest == f"d1.{version}" for version, digest in seen)


async def test_a_trainer_that_was_replaced_announces_nothing(bus: Bus, tmp_path: Path) -> None:
    """A version of the replaced trainer is older than those of its successor, whatever its number."""
    old, new = (Publishing(bus, ServiceSettings(shm_dir=tmp_path), "job_1") for _ in range(2))
    await old.announce(manifest(3, 1))
    await new.announce(manifest(4, 2))
    with pytest.raises(Fenced, match="trainer epoch 2 > 1"):
        await old.announce(manifest(5, 1))
    assert await new.newest() == 4


async def test_the_base_of_a_replaced_trainer_replaces_no_later_one(bus: Bus, tmp_path: Path) -> None:
    """The adapters of the later trainer belong to the base that it has announced."""
    old, new = (Publishing(bus, ServiceSettings(shm_dir=tmp_path), "job_1") for _ in range(2))
    key = subjects.base_manifest("job_1")
    old._base_manifest, new._base_manifest = manifest(0, 1), manifest(0, 2)
    await new.announce(manifest(4, 2))
    with pytest.raises(Fenced, match="trainer epoch 2 > 1"):
        await old.announce(manifest(5, 1))
    assert await new._known(key) == manifest(0, 2)
    assert await new.newest() == 4


async def test_a_completed_version_spares_the_file_of_the_one_served_by_then(
    bus: Bus, make_config: Callable[..., JobConfig], tmp_path: Path
) -> None:
    """Engines serve version 1 when the directory fails, and version 2 when it can be written again."""
    disk, away, routes = tmp_path / "disk", tmp_path / "away", WeightRoutes(epoch=0, transports={})
    disk.mkdir()
    settings = ServiceSettings(host_id="a", data_dir=tmp_path, shm_dir=tmp_path, weight_disk=disk)
    publishing, learner = Publishing(bus, settings, "job_1", gated=True), Learner(make_config())
    published: dict[int, WeightManifest] = {}

    async def write(version: int) -> None:
        keep = await publishing._known("job_1")
        published[version] = await asyncio.to_thread(publishing._write, version, 1, keep, routes, learner)
        await publishing.announce(published[version])

    try:
        await write(1)
        await publishing.announce_served(published[1])
        for version in (2, 3):
            await write(version)
        disk.rename(away)
        for version in (4, 5):
            await write(version)
        assert publishing.problem is not None
        await publishing.announce_served(published[2])
        away.rename(disk)
        await publishing.complete()
        assert publishing.problem is None
        far = open_receiver(settings.model_copy(update={"host_id": "b"}))
        for key in ("job_1", subjects.candidate_manifest("job_1")):
            known = await publishing._known(key)
            assert known is not None
            staged = far.stage(known)
            assert (staged.manifest.version, staged.way.transport) == (2 if key == "job_1" else 5, "disk")
            staged.release()
        far.close()
    finally:
        publishing.close()
        cleanup("job_1", settings)
