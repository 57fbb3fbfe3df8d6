"""Contract of every weight transport: receivers stage exactly the published bits, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import UnreadableWeights, WeightsError
from penstock.shared.protocol.weights import Layout, WeightManifest
from penstock.shared.transport.bulk_segment import DATA_OFFSET
from penstock.shared.weights import WeightReceiver, cleanup, layout_of, open_publisher, open_receiver
from penstock.shared.weights.cuda_ipc import CudaIpcReceiver
from penstock.shared.weights.device import DeviceMemory
from penstock.shared.weights.disk import DiskReceiver
from penstock.shared.weights.open import Publisher, Receiver
from penstock.shared.weights.shm import ShmReceiver
from penstock.shared.weights.tcp import TcpReceiver
from tests.contract.device_memories import FileMemory, OneProcessCudaMemory


def weights(seed: int) -> dict[str, Tensor]:
    """Return tensors of every dtype, with odd sizes, among them an empty, a scalar and a transposed tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7, 5, generator=generator),
        "bf16": torch.randn(33, generator=generator).to(torch.bfloat16),
        "half": torch.randn(3, generator=generator).half(),
        "double": torch.randn(2, 2, generator=generator).double(),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "large": torch.randn(700_000, generator=generator),
        "parameter": torch.nn.Parameter(torch.randn(9, generator=generator)),
        "steps": torch.tensor(seed),
        "flags": torch.rand(11, generator=generator) > 0.5,
        "bytes": torch.arange(5, dtype=torch.uint8),
        "ints": torch.arange(3, dtype=torch.int32) + seed,
        "empty": torch.empty(0, 4),
    }


@dataclass
class Plane:
    """A publisher of one job, and receivers of its weights by one transport."""

    name: str
    publisher: Publisher
    layout: Layout
    receiver: Callable[[], WeightReceiver]
    settings: ServiceSettings
    memory: FileMemory | OneProcessCudaMemory | None

    def successor(self) -> Publisher:
        return open_plane(self.name, self.layout, self.settings, self.memory)

    def publish(self, seed: int, *, version: int, epoch: int = 1) -> WeightManifest:
        return self.publisher.publish(weights(seed).items(), version=version, epoch=epoch)

    def flip_a_bit(self, manifest: WeightManifest) -> None:
        if self.memory is not None:
            self.memory.exported[bytes.fromhex(manifest.refs[0].handle.split("/")[3])].flat[1000] ^= 4
            return
        ref = next(ref for ref in manifest.refs if ref.transport in {"shm", "disk"})
        path = (self.settings.weight_disk or self.settings.shm_dir) / ref.handle
        at = DATA_OFFSET + 1000 if ref.transport == "shm" else path.stat().st_size - 1000
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))


def open_plane(name: str, layout: Layout, settings: ServiceSettings, memory: DeviceMemory | None) -> Publisher:
    if name == "disk":
        return open_publisher("job_a", layout, settings, transports=("disk",))
    return open_publisher("job_a", layout, settings, memory=memory)


@pytest.fixture(params=["shm", "tcp", "disk", "cuda_ipc", pytest.param("cuda_ipc on a GPU", marks=pytest.mark.gpu)])
def plane(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    name: str = request.param
    host = "127.0.0.1" if name == "tcp" else ""
    disk = tmp_path_factory.mktemp("disk") if name == "disk" else None
    settings = ServiceSettings(host_id="trainer-host", shm_dir=tmp_path, bulk_host=host, weight_disk=disk)
    layout = layout_of(weights(0).items())
    memory: Any = None
    if name.startswith("cuda_ipc"):
        memory = FileMemory(tmp_path_factory.mktemp("device")) if name == "cuda_ipc" else OneProcessCudaMemory()
    makers: dict[str, Callable[[], WeightReceiver]] = {
        "shm": lambda: ShmReceiver(settings, layout),
        "tcp": lambda: TcpReceiver(settings, layout, timeout_s=10),
        "disk": lambda: DiskReceiver(settings, layout),
    }
    receiver = makers.get(name, lambda: CudaIpcReceiver(settings, memory, layout))
    publisher = open_plane(name, layout, settings, memory)
    yield Plane(name, publisher, layout, receiver, settings, memory)
    publisher.close()


def assert_equal(staged: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(staged) == list(expected)
    for name, tensor in expected.items():
        assert staged[name].dtype == tensor.dtype
        assert staged[name].shape == tensor.shape
        assert not staged[name].requires_grad
        assert torch.equal(staged[name].cpu(), tensor.detach()), name


def test_staged_tensors_equal_the_published_ones(plane: Plane) -> None:
    receiver = plane.receiver()
    for version in range(1, 5):
        staged = receiver.stage(plane.publish(version, version=version))
        assert staged.manifest.version == version
        assert_equal(staged.tensors(), weights(version))
        assert staged.intact()
        staged.release()
        staged.release()


def test_version_in_use_outlives_the_next_ones(plane: Plane) -> None:
    receiver = plane.receiver()
    serving = receiver.stage(plane.publish(1, version=1))
    for version in range(2, 6):
        staged = receiver.stage(plane.publish(version, version=version))
        assert_equal(serving.tensors(), weights(version - 1))
        assert serving.intact()
        serving.release()
        serving = staged


def test_two_receivers_stage_the_same_version(plane: Plane) -> None:
    manifest = plane.publish(3, version=1)
    first, second = plane.receiver().stage(manifest), plane.receiver().stage(manifest)
    first.release()
    plane.publish(4, version=2)
    plane.publish(5, version=3)
    assert_equal(second.tensors(), weights(3))
    assert second.intact()


def test_late_joiner_stages_the_newest_manifest(plane: Plane) -> None:
    for version in (1, 2, 3):
        manifest = plane.publish(version, version=version)
    assert_equal(plane.receiver().stage(manifest).tensors(), weights(3))


def test_digest_depends_on_values_only(plane: Plane) -> None:
    first = plane.publish(1, version=1)
    shuffled = dict(reversed(weights(1).items()))
    again = plane.publisher.publish(shuffled.items(), version=2, epoch=1)
    assert first.digest == again.digest != plane.publish(2, version=3).digest


def test_flipped_bit_is_refused_and_the_next_version_works(plane: Plane) -> None:
    receiver = plane.receiver()
    receiver.stage(plane.publish(1, version=1)).release()
    manifest = plane.publish(2, version=2)
    plane.flip_a_bit(manifest)
    with pytest.raises(WeightsError, match=r"digest|version 2"):
        receiver.stage(manifest)
    staged = receiver.stage(plane.publish(3, version=3))
    assert_equal(staged.tensors(), weights(3))


def test_manifest_of_an_overwritten_version_is_refused(plane: Plane) -> None:
    receiver = plane.receiver()
    stale = plane.publish(1, version=1)
    for version in (2, 3, 4):
        plane.publish(version, version=version)
    with pytest.raises(WeightsError, match="version 1"):
        receiver.stage(stale)


def test_bytes_without_the_digest_of_the_manifest_are_refused(plane: Plane) -> None:
    manifest = msgspec.structs.replace(plane.publish(1, version=1), digest="0" * 32)
    with pytest.raises(WeightsError, match="version 1"):
        plane.receiver().stage(manifest)


def test_other_layouts_are_refused(plane: Plane) -> None:
    other = layout_of([*weights(0).items(), ("extra", torch.zeros(1))])
    manifest = plane.publish(1, version=1)
    with pytest.raises(UnreadableWeights, match="another model"):
        plane.receiver().stage(msgspec.structs.replace(manifest, layout=other))


def test_manifests_survive_the_wire(plane: Plane) -> None:
    manifest = plane.publish(1, version=1)
    wired = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest)
    assert wired == manifest
    assert_equal(plane.receiver().stage(wired).tensors(), weights(1))


def test_publishing_refuses_tensors_that_do_not_fit(plane: Plane) -> None:
    good = weights(1)
    cases = {
        "missing": {name: good[name] for name in good if name != "bf16"},
        "not in layout": {**good, "extra": torch.zeros(1)},
        "layout says": {**good, "embed": good["embed"].double()},
        "layout says float32": {**good, "embed": good["embed"].T},
    }
    for reason, tensors in cases.items():
        with pytest.raises(WeightsError, match=reason):
            plane.publisher.publish(tensors.items(), version=1, epoch=1)
    assert_equal(plane.receiver().stage(plane.publish(1, version=1)).tensors(), good)


def test_restarted_publisher_goes_on(plane: Plane) -> None:
    serving = plane.receiver().stage(plane.publish(1, version=1))
    plane.publisher.close()
    successor = plane.successor()
    for version in (2, 3, 4):
        manifest = successor.publish(weights(version).items(), version=version, epoch=2)
    assert_equal(plane.receiver().stage(manifest).tensors(), weights(4))
    assert_equal(serving.tensors(), weights(1))
    assert serving.intact()
    successor.close()


def test_cleanup_leaves_nothing_and_versions_in_use_stay(plane: Plane) -> None:
    staged = plane.receiver().stage(plane.publish(1, version=1))
    neighbour = open_publisher("job_ab", plane.layout, plane.settings)
    cleanup("job_a", plane.settings)
    assert plane.settings.weight_disk is None or not list(plane.settings.weight_disk.iterdir())
    left = [path.name for path in plane.settings.shm_dir.rglob("*") if path.is_file()]
    assert sorted(left) == ["penstock-weights-job_ab.0", "penstock-weights-job_ab.1"]
    assert_equal(staged.tensors(), weights(1))
    neighbour.close()


def test_open_receiver_prefers_the_slot_and_falls_back(tmp_path: Path) -> None:
    near = ServiceSettings(host_id="a", shm_dir=tmp_path / "a", weight_disk=tmp_path / "disk")
    far = ServiceSettings(host_id="b", shm_dir=tmp_path / "b", weight_disk=tmp_path / "disk")
    trainer = near.model_copy(update={"bulk_host": "127.0.0.1"})
    trainer.shm_dir.mkdir()
    tmp_path.joinpath("disk").mkdir()
    layout = layout_of(weights(0).items())
    publisher = open_publisher("job_a", layout, trainer)
    manifest = publisher.publish(weights(1).items(), version=1, epoch=1)
    assert [ref.transport for ref in manifest.refs] == ["shm", "tcp", "disk"]

    def kind(receiver: Receiver) -> str:
        staged = receiver.stage(manifest)
        assert_equal(staged.tensors(), weights(1))
        staged.release()
        return type(staged).__name__

    assert kind(open_receiver(near, layout)) == "ShmStaged"
    assert kind(open_receiver(far)) == "LocalStaged"  # its directory cannot hold a copy for its host
    far.shm_dir.mkdir()
    assert kind(open_receiver(far)) == "ShmStaged"
    publisher.close()
    for path in trainer.shm_dir.iterdir():
        path.unlink()
    assert kind(open_receiver(near, layout)) == "LocalStaged"  # from disk
    cleanup("job_a", trainer)
    with pytest.raises(WeightsError, match=r"no segment.*cannot fetch.*PENSTOCK_WEIGHT_DISK must be the trainer's"):
        open_receiver(near, layout).stage(manifest)


@pytest.fixture
def shared(tmp_path: Path) -> ServiceSettings:
    tmp_path.joinpath("disk").mkdir()
    return ServiceSettings(host_id="a", shm_dir=tmp_path, weight_disk=tmp_path / "disk")


def test_only_the_newest_files_and_the_served_one_stay_on_disk(shared: ServiceSettings, tmp_path: Path) -> None:
    """Files of replaced trainers go, too, also those that they did not finish; a newer trainer's do not."""
    layout, folder, served = layout_of(weights(0).items()), tmp_path / "disk" / "job_a", None
    for epoch in (1, 2):
        publisher = open_publisher("job_a", layout, shared, transports=("disk",))
        for version in range(1, 5):
            manifest = publisher.publish(weights(version).items(), version=version, epoch=epoch, keep=served)
            served = served or manifest
            assert len(list(folder.glob("*.safetensors"))) <= 3
        publisher.close()
        for name in ("00000001-00000005.7.tmp", "00000003-00000001.7.tmp"):
            folder.joinpath(name).write_bytes(b"partial")
    manifest = open_publisher("job_a", layout, shared, transports=("disk",)).publish(
        weights(5).items(), version=5, epoch=2, keep=served
    )
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "00000001-00000001.safetensors", "00000002-00000004.safetensors", "00000002-00000005.safetensors",
        "00000003-00000001.7.tmp",
    ]  # fmt: skip
    assert served is not None
    for kept in (served, manifest):
        assert_equal(DiskReceiver(shared, layout).stage(kept).tensors(), weights(kept.version))


def test_files_have_the_mode_of_the_umask_and_strange_ones_stay(shared: ServiceSettings, tmp_path: Path) -> None:
    layout, folder = layout_of(weights(0).items()), tmp_path / "disk" / "job_a"
    before = os.umask(0o027)
    try:
        open_publisher("job_a", layout, shared, transports=("disk",)).publish(weights(1).items(), version=1, epoch=1)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o640]
    folder.joinpath(".nfs01.tmp").mkdir()  # cannot be unlinked, like a file of NFS that is still open
    cleanup("job_a", shared)
    assert ".nfs01.tmp" in {path.name for path in folder.iterdir()}


def test_a_file_that_is_cut_off_is_refused(shared: ServiceSettings, tmp_path: Path) -> None:
    layout = layout_of(weights(0).items())
    manifest = open_publisher("job_a", layout, shared, transports=("disk",)).publish(
        weights(1).items(), version=1, epoch=1
    )
    path = tmp_path / "disk" / manifest.refs[0].handle
    whole = path.read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"version 1 .*(cut off|damaged)"):
            DiskReceiver(shared, layout).stage(manifest)
    path.write_bytes(whole)
    assert_equal(DiskReceiver(shared, layout).stage(manifest).tensors(), weights(1))


def test_a_missing_shared_directory_is_not_created(shared: ServiceSettings, tmp_path: Path) -> None:
    """Below a missing mount no other host would see the files."""
    tmp_path.joinpath("disk").rmdir()
    publisher = open_publisher("job_a", layout_of(weights(0).items()), shared, transports=("disk",))
    with pytest.raises(WeightsError, match=r"cannot write version 1 .*\(PENSTOCK_WEIGHT_DISK\): .*No such file"):
        publisher.publish(weights(1).items(), version=1, epoch=1)
    publisher.close()
    assert not tmp_path.joinpath("disk").exists()


def test_a_full_shared_directory_stops_no_other_transport(
    shared: ServiceSettings, tmp_path: Path, disk: Callable[..., Path], fill: Callable[[Path], Path]
) -> None:
    """Once there is room, the same version is written there, too."""
    share = disk(16, tmp_path / "share")
    near = shared.model_copy(update={"weight_disk": share})
    far = near.model_copy(update={"host_id": "b"})
    publisher = open_publisher("job_a", layout_of(weights(0).items()), near)
    publisher.publish(weights(1).items(), version=1, epoch=1)
    ballast = fill(share)
    manifest = publisher.publish(weights(2).items(), version=2, epoch=1)
    assert [ref.transport for ref in manifest.refs] == ["shm"]
    (written,) = share.joinpath("job_a").iterdir()
    free = os.statvfs(share)
    assert publisher.problem == (
        f"cannot write version 2 to {written.parent} (PENSTOCK_WEIGHT_DISK): No space left on device: the file needs "
        f"{written.stat().st_size} bytes, and {free.f_bavail * free.f_frsize} are free; make room there; other "
        "transports have this version"
    )
    assert publisher.complete() == ()
    assert_equal(open_receiver(near).stage(manifest).tensors(), weights(2))
    with pytest.raises(UnreadableWeights, match="this worker can use none of it"):
        open_receiver(far).stage(manifest)
    assert [path.name for path in share.joinpath("job_a").iterdir()] == ["00000001-00000001.safetensors"]
    ballast.unlink()
    (ref,) = publisher.complete()
    assert (publisher.problem, publisher.complete()) == ("", ())
    staged = open_receiver(far).stage(msgspec.structs.replace(manifest, refs=(*manifest.refs, ref)))
    assert_equal(staged.tensors(), weights(2))
    publisher.close()


DIES_WHILE_IT_WRITES = """
import os, signal, sys, torch
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.weights import layout_of, open_publisher
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
weights = {"w": torch.zeros(900_000)}
settings = ServiceSettings(host_id="a", shm_dir=Path(sys.argv[1]), weight_disk=Path(sys.argv[1]))
publisher = open_publisher("job_a", layout_of(weights.items()), settings, transports=("disk",))
publisher.publish(weights.items(), version=1, epoch=int(sys.argv[2]))
"""


@pytest.mark.long
def test_the_unfinished_file_of_a_killed_trainer_makes_room_for_its_successor(
    shared: ServiceSettings, tmp_path: Path, disk: Callable[..., Path]
) -> None:
    """Two unfinished files and a version do not fit. The file of a trainer with a higher epoch stays."""
    share = disk(9, tmp_path / "share")
    for epoch in (3, 1):
        command = [sys.executable, "-c", DIES_WHILE_IT_WRITES, str(share), str(epoch)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    left = sorted(path.name for path in share.joinpath("job_a").iterdir())
    assert [name.partition(".")[0] for name in left] == ["00000001-00000001", "00000003-00000001"]
    near = shared.model_copy(update={"weight_disk": share})
    publisher = open_publisher("job_a", layout_of(weights(0).items()), near, transports=("disk",))
    manifest = publisher.publish(weights(1).items(), version=1, epoch=2)
    assert sorted(path.name for path in share.joinpath("job_a").iterdir()) == ["00000002-00000001.safetensors", left[1]]
    assert_equal(DiskReceiver(near).stage(manifest).tensors(), weights(1))
    publisher.close()


def test_weight_files_can_be_read_by_the_library_of_safetensors(shared: ServiceSettings, tmp_path: Path) -> None:
    publisher = open_publisher("job_a", layout_of(weights(0).items()), shared, transports=("disk",))
    path = tmp_path / "disk" / publisher.publish(weights(1).items(), version=1, epoch=2).refs[0].handle
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"job": "job_a", "version": "1", "epoch": "2"}
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert_equal({name: read[name] for name in weights(1)}, weights(1))
    assert len(read) == len(weights(1))


def test_receiver_refuses_the_epoch_of_a_replaced_trainer(tmp_path: Path) -> None:
    settings = ServiceSettings(host_id="a", shm_dir=tmp_path, data_dir=tmp_path)
    publisher = open_publisher("job_a", layout_of(weights(0).items()), settings)
    old = publisher.publish(weights(1).items(), version=1, epoch=1)
    new = publisher.publish(weights(2).items(), version=1, epoch=2)
    receiver = open_receiver(settings)
    receiver.stage(old).release()
    receiver.stage(new).release()
    with pytest.raises(WeightsError, match="epoch 2 took over"):
        receiver.stage(old)
    publisher.close()
