"""Faults of weights in device memory: unverified weights are not served, and the version uses another transport.

The device is a file here, except where a test is marked ``gpu``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes, make_layout
from penstock.shared.transport.bulk_segment import LockedFile
from penstock.shared.weights import cuda_ipc, device_memory, open_publisher, open_receiver
from penstock.shared.weights.cuda_ipc import CudaIpcReceiver
from penstock.shared.weights.device import _SOURCE, CudaMemory, DeviceBuffer, DeviceMemory, mixed_digest
from penstock.shared.weights.open import Publisher
from tests.contract.device_memories import FileMemory

JOB, ROOT = "job_d", Path(__file__).parents[2]
LAYOUT = make_layout([("w", "float32", (1000, 30)), ("b", "bfloat16", (17,))])

CHILD = """
import os, signal, sys, msgspec, torch
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.protocol.weights import WeightManifest, make_layout
from penstock.shared.weights import open_publisher
from penstock.shared.weights.cuda_ipc import CudaIpcReceiver
from penstock.shared.weights.device import CudaMemory
from tests.contract.device_memories import FileMemory
torch.set_num_threads(1)
layout = make_layout([("w", "float32", (1000, 30)), ("b", "bfloat16", (17,))])
settings = ServiceSettings(host_id="h", shm_dir=Path(sys.argv[1]))
memory = FileMemory(Path(sys.argv[2])) if sys.argv[2] else CudaMemory()
def read():
    return msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=WeightManifest)
"""

DIES_WHILE_IT_COPIES = """
def copy(source, target):
    print("copying", flush=True)
    sys.stdin.readline()
memory.copy = copy
CudaIpcReceiver(settings, memory).stage(read())
"""

DIES_WHILE_IT_WRITES = """
def tensors(version):
    yield "w", torch.full((1000, 30), float(version))
    if version == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    yield "b", torch.full((17,), float(version), dtype=torch.bfloat16)
publisher = open_publisher("job_d", layout, settings, memory=memory)
print(msgspec.msgpack.encode(publisher.publish(tensors(1), version=1, epoch=1)).hex(), flush=True)
sys.stdin.readline()
publisher.publish(tensors(2), version=2, epoch=1)
"""

STAGES = """
receiver = CudaIpcReceiver(settings, memory)
while line := sys.stdin.readline():
    manifest = msgspec.msgpack.decode(bytes.fromhex(line), type=WeightManifest)
    staged = receiver.stage(manifest)
    values = staged.tensors()["w"]
    print(staged.way.transport, values.device.type, float(values.min()), float(values.max()), flush=True)
    staged.release()
receiver.close()
"""


def weights(value: float, device: str = "cpu") -> list[tuple[str, Tensor]]:
    b = torch.full((17,), value, dtype=torch.bfloat16, device=device)
    return [("w", torch.full((1000, 30), float(value), device=device)), ("b", b)]


class Plane:
    """A trainer with a device, and receivers on its host."""

    def __init__(self, shm_dir: Path, device_dir: Path) -> None:
        shm_dir.mkdir()
        self.settings = ServiceSettings(host_id="h", shm_dir=shm_dir, data_dir=shm_dir.parent)
        self.memory = FileMemory(device_dir)
        self.publisher = self.open()

    def open(self) -> Publisher:
        return open_publisher(JOB, LAYOUT, self.settings, memory=self.memory)

    def publish(self, version: int) -> WeightManifest:
        return self.publisher.publish(weights(version), version=version, epoch=1)

    def receiver(self, memory: DeviceMemory | None = None) -> CudaIpcReceiver:
        return CudaIpcReceiver(self.settings, memory or self.memory, LAYOUT)

    def slots(self) -> list[Path]:
        return sorted(self.settings.shm_dir.glob("penstock-device-*-[0-9]"))


@pytest.fixture
def plane(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    opened = Plane(tmp_path / "shm", tmp_path_factory.mktemp("device"))
    yield opened
    opened.publisher.close()


@pytest.fixture
def spawn(plane: Plane) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []

    def start(script: str, device_dir: Path | None) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD + script, str(plane.settings.shm_dir), str(device_dir or "")]
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


def send(child: subprocess.Popen[str], manifest: WeightManifest) -> None:
    assert child.stdin is not None
    child.stdin.write(msgspec.msgpack.encode(manifest).hex() + "\n")
    child.stdin.flush()


def read_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def value(receiver: CudaIpcReceiver, manifest: WeightManifest) -> float:
    return float(receiver.stage(manifest).tensors()["w"][0, 0])


def test_a_handle_is_opened_once_per_slot(plane: Plane) -> None:
    receiver = plane.receiver()
    assert [value(receiver, plane.publish(version)) for version in range(1, 8)] == list(range(1, 8))
    assert (plane.memory.num_opened, len(plane.memory.exported), len(plane.slots())) == (2, 2, 2)


def test_the_manifest_carries_64_opaque_bytes_and_a_tagged_digest(plane: Plane) -> None:
    manifest = plane.publish(1)
    slot, device, boot, memory, digest = manifest.refs[0].handle.split("/")
    assert [ref.transport for ref in manifest.refs] == ["cuda_ipc", "shm"]
    assert plane.settings.shm_dir.joinpath(slot).exists()
    assert (device, boot) == ("GPU-0", Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    assert bytes.fromhex(memory) in plane.memory.exported
    assert digest == mixed_digest(plane.memory.exported[bytes.fromhex(memory)].flat.numpy())


@pytest.mark.parametrize(
    ("part", "other", "reason"),
    [
        (0, "../penstock-weights-job_d.0", "is not a device slot of job"),
        (0, "penstock-device-job_other.0123456789abcdef-0", "is not a device slot of job"),
        (0, "penstock-device-job_d.0123456789abcdef-0", "the process that published it ended"),
        (1, "GPU-7", "GPU GPU-0 cannot read memory of GPU GPU-7"),
        (2, "another boot", "was made before host 'h' booted"),
        (3, "ab" * 63, "has no handle of 64 bytes"),
        (3, "ab" * 64, "cannot be read: invalid resource handle"),
        (4, "mix1-0", "do not match digest"),
    ],
)  # fmt: skip
def test_references_that_prove_nothing_are_refused(plane: Plane, part: int, other: str, reason: str) -> None:
    manifest = plane.publish(1)
    parts = manifest.refs[0].handle.split("/")
    handle = "/".join([*parts[:part], other, *parts[part + 1 :]]) if "/" not in other else other
    damaged = msgspec.structs.replace(manifest.refs[0], handle=handle)
    with pytest.raises(WeightsError, match=re.escape(reason)):
        plane.receiver().stage(msgspec.structs.replace(manifest, refs=(damaged,)))
    assert value(plane.receiver(), manifest) == 1


def test_another_host_is_refused(plane: Plane) -> None:
    other = CudaIpcReceiver(plane.settings.model_copy(update={"host_id": "i"}), plane.memory)
    with pytest.raises(WeightsError, match="has no device slot on host 'i'"):
        other.stage(plane.publish(1))


def test_a_peer_reads_and_others_use_shared_memory(plane: Plane) -> None:
    manifest, directory = plane.publish(1), plane.memory.directory
    peer, stranger = FileMemory(directory, "GPU-1", ("GPU-0",)), FileMemory(directory, "GPU-2")
    ways = {}
    for memory in (plane.memory, peer, stranger):
        receiver = open_receiver(plane.settings, LAYOUT, memory=memory)
        assert receiver.transports == ["cuda_ipc", "shm", "tcp"]
        ways[memory.device] = receiver.stage(manifest).way.transport
    assert ways == {"GPU-0": "cuda_ipc", "GPU-1": "cuda_ipc", "GPU-2": "shm"}
    receiver = open_receiver(plane.settings, LAYOUT, memory=peer)
    receiver.follow("w", WeightRoutes(epoch=1, transports={"w": "shm"}))
    assert receiver.stage(manifest).way.transport == "shm", "the coordinator chooses"


def test_a_flipped_bit_in_the_device_goes_another_way(plane: Plane) -> None:
    manifest = plane.publish(1)
    plane.memory.exported[bytes.fromhex(manifest.refs[0].handle.split("/")[3])].flat[4321] ^= 128
    staged = open_receiver(plane.settings, LAYOUT, memory=plane.memory).stage(manifest)
    assert (staged.way.transport, float(staged.tensors()["w"].sum())) == ("shm", 30_000)


def test_a_publication_needs_no_slot_of_the_device(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "ROOM_S", 0.1)
    held = []
    for version in range(1, 4):
        slot = plane.publish(version).refs[0].handle.split("/")[0]
        held.append(LockedFile.open(plane.settings.shm_dir / slot))
        assert held[-1].try_shared()
    manifest = plane.publish(4)
    assert ([ref.transport for ref in manifest.refs], len(plane.slots())) == (["shm"], 3)
    assert float(open_receiver(plane.settings, LAYOUT).stage(manifest).tensors()["w"][0, 0]) == 4
    held[0].close()
    assert value(plane.receiver(), plane.publish(5)) == 5


def test_a_publication_needs_no_room_for_a_slot_of_the_device(
    tmp_path: Path, disk: Callable[..., Path], fill: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receivers hold both slots of the device, and the directory is too full for the file of a third one."""
    monkeypatch.setattr(cuda_ipc, "ROOM_S", 0.1)
    tmp_path.joinpath("device").mkdir()
    plane = Plane(disk(1, tmp_path / "disk") / "shm", tmp_path / "device")
    held = []
    for version in range(1, 3):
        slot = plane.publish(version).refs[0].handle.split("/")[0]
        held.append(LockedFile.open(plane.settings.shm_dir / slot))
        assert held[-1].try_shared()
    ballast = fill(plane.settings.shm_dir)
    manifest = plane.publish(3)
    assert ([ref.transport for ref in manifest.refs], len(plane.slots())) == (["shm"], 2)
    ballast.unlink()
    assert [ref.transport for ref in plane.publish(4).refs] == ["cuda_ipc", "shm"]
    for lock in held:
        lock.close()
    plane.publisher.close()


def test_a_wait_for_a_slot_of_shared_memory_is_shown(plane: Plane) -> None:
    """The device has room, but workers that read from shared memory hold its slots; the wait has the same deadline."""
    held = []
    for version in range(1, 5):
        manifest = plane.publish(version)
        held.append(LockedFile.open(plane.settings.shm_dir / manifest.refs[1].handle))
        assert held[-1].try_shared()
    assert plane.publisher.waiting is None
    publishing = threading.Thread(target=plane.publish, args=(5,))
    publishing.start()
    while (waiting := plane.publisher.waiting) is None:
        assert publishing.is_alive()
        time.sleep(0.01)
    for lock in held:
        lock.close()
    publishing.join(60)
    assert waiting[0].startswith(f"a weight slot: all 4 are in use, by process {os.getpid()}")
    assert (publishing.is_alive(), plane.publisher.waiting) == (False, None)


def test_a_publication_needs_no_room_on_the_device(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(nbytes: int) -> DeviceBuffer:
        raise Unavailable(f"GPU-0 cannot export {nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(plane.memory, "allocate", full)
        assert [ref.transport for ref in plane.publish(1).refs] == ["shm"]
    assert value(plane.receiver(), plane.publish(2)) == 2


@pytest.mark.parametrize("error", [RuntimeError("an illegal access"), MemoryError("no room"), Exception("NVRTC")])
def test_an_error_of_the_device_sends_a_version_another_way(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Tensor) -> str:
        raise error

    chain = open_receiver(plane.settings, LAYOUT, memory=plane.memory)
    with monkeypatch.context() as patch:
        patch.setattr(plane.memory, "copy", fail)
        assert chain.stage(plane.publish(1)).way.transport == "shm"
        patch.setattr(plane.memory, "digest", fail)
        manifest = plane.publish(2)
        assert [ref.transport for ref in manifest.refs] == ["shm"]
        assert float(chain.stage(manifest).tensors()["w"][0, 0]) == 2
    assert chain.stage(plane.publish(3)).way.transport == "cuda_ipc"


@pytest.mark.long
def test_a_slot_that_is_copied_is_not_written_and_a_death_frees_it(
    plane: Plane, spawn: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "MAX_SLOTS", 2)
    monkeypatch.setattr(cuda_ipc, "ROOM_S", 0.1)
    plane.publisher.close()
    plane.publisher = plane.open()
    child, manifest = spawn(DIES_WHILE_IT_COPIES, plane.memory.directory), plane.publish(1)
    send(child, manifest)
    assert read_line(child) == "copying"
    buffer = plane.memory.exported[bytes.fromhex(manifest.refs[0].handle.split("/")[3])]
    transports = [plane.publish(version).refs[0].transport for version in (2, 3)]
    assert (transports, float(buffer.flat.view(torch.float32)[0])) == (["cuda_ipc", "shm"], 1)
    child.kill()
    child.wait()
    assert value(plane.receiver(), plane.publish(4)) == 4


@pytest.mark.long
def test_the_death_of_the_publisher_is_named(plane: Plane, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    """The receiver names the death, although the memory is mapped or could still be mapped."""
    plane.publisher.close()
    child = spawn(DIES_WHILE_IT_WRITES, plane.memory.directory)
    manifest = msgspec.msgpack.decode(bytes.fromhex(read_line(child)), type=WeightManifest)
    receiver, chain = plane.receiver(), open_receiver(plane.settings, LAYOUT, memory=plane.memory)
    served = receiver.stage(manifest)
    child.communicate("\n")
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(WeightsError, match="the process that published it ended, and its device memory with it"):
        receiver.stage(manifest)
    assert chain.stage(manifest).way.transport == "shm"
    assert (served.intact(), float(served.tensors()["w"].sum())) == (True, 30_000), "the engine serves a copy"
    left = set(plane.settings.shm_dir.glob("penstock-device-*"))
    plane.publisher = plane.open()
    assert not left & set(plane.settings.shm_dir.glob("penstock-device-*")), "its files are swept"
    assert value(receiver, plane.publisher.publish(weights(3), version=2, epoch=2)) == 3


def test_memory_stays_while_a_receiver_maps_it(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_ipc, "NAME_S", 0.1)
    receiver, manifest = plane.receiver(), plane.publish(1)
    receiver.stage(manifest)
    plane.publish(2)
    plane.publisher.close()
    files = sorted(plane.memory.directory.iterdir())
    assert len(files) == 2
    deadline = time.monotonic() + 30
    while f"bytes of a GPU stay allocated: process {os.getpid()} still maps them" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(WeightsError, match="the process that published it ended"):
        receiver.stage(manifest)  # and unmaps
    deadline = time.monotonic() + 30
    while list(plane.memory.directory.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list(plane.memory.directory.iterdir())
    assert not list(plane.settings.shm_dir.glob("penstock-device-*"))


def test_memory_stays_mapped_while_a_thread_copies_it(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is stopped closes its receiver while the thread that stages goes on."""
    receiver, manifest, copy = plane.receiver(), plane.publish(1), plane.memory.copy
    closing = threading.Thread(target=receiver.close)

    def copy_while_closing(source: Tensor, target: Tensor) -> str:
        closing.start()
        closing.join(0.5)
        (mapped,) = plane.settings.shm_dir.glob("penstock-device-*-mapped")
        assert not LockedFile.open(mapped).try_exclusive(), "the publisher could free what is copied"
        return copy(source, target)

    monkeypatch.setattr(plane.memory, "copy", copy_while_closing)
    assert value(receiver, manifest) == 1
    closing.join(30)
    (mapped,) = plane.settings.shm_dir.glob("penstock-device-*-mapped")
    assert LockedFile.open(mapped).try_exclusive(), "it is unmapped once the copy is complete"


def test_memory_is_not_freed_while_a_thread_publishes(plane: Plane) -> None:
    """A trainer that is stopped closes its publisher while the thread that writes goes on."""
    closing = threading.Thread(target=plane.publisher.close)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from weights(1)
        closing.start()
        closing.join(0.5)
        assert len(list(plane.memory.directory.iterdir())) == 1, "the slot that is written"

    plane.publisher.publish(tensors(), version=1, epoch=1)
    closing.join(30)
    assert not list(plane.memory.directory.iterdir())
    with pytest.raises(WeightsError, match="version 2 is not published: its publisher is closed"):
        plane.publish(2)
    assert not list(plane.memory.directory.iterdir())


@pytest.mark.parametrize("job", [JOB, "job_e"])
def test_any_version_unmaps_the_memory_of_a_publisher_that_ended(plane: Plane, job: str) -> None:
    """Such publishers remain after a change of the job's backend, or in a worker of several jobs."""
    chain = open_receiver(plane.settings, LAYOUT, memory=plane.memory)
    assert chain.stage(plane.publish(1)).way.transport == "cuda_ipc"
    plane.publisher.close()
    assert len(list(plane.memory.directory.iterdir())) == 1
    without = open_publisher(job, LAYOUT, plane.settings)
    assert chain.stage(without.publish(weights(2), version=2, epoch=2)).way.transport == "shm"
    without.close()
    deadline = time.monotonic() + 30
    while list(plane.memory.directory.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list(plane.memory.directory.iterdir())


def test_memory_of_a_replaced_publisher_is_unmapped_although_it_lives(plane: Plane) -> None:
    """The lease may have moved to a trainer on another host; versions of other jobs change nothing."""
    chain = open_receiver(plane.settings, LAYOUT, memory=plane.memory)
    chain.stage(plane.publish(1))
    (path,) = plane.settings.shm_dir.glob("penstock-device-*-mapped")
    mapped, free = LockedFile.open(path), []
    for job in ("job_e", JOB):
        other = open_publisher(job, LAYOUT, plane.settings)
        chain.stage(other.publish(weights(2), version=2, epoch=2))
        other.close()
        free.append(mapped.try_exclusive())
    assert free == [False, True]
    mapped.close()


def test_without_a_device_the_setting_says_why() -> None:
    assert device_memory(ServiceSettings()) is None
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="PENSTOCK_WEIGHT_CUDA_IPC is set, but torch finds no CUDA device"):
            device_memory(ServiceSettings(weight_cuda_ipc=True))


def test_the_digest_is_that_of_the_documentation() -> None:
    assert mixed_digest(np.zeros(0, np.uint8)) == "mix1-" + "0" * 32
    assert mixed_digest(np.arange(64, dtype=np.uint8)) == "mix1-7a9efac9e0217bfd07000eaf36cfbebb"


def test_the_digest_sees_what_sums_miss() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    words, seen = data.view(np.uint64), {mixed_digest(data)}
    for bit in range(64):  # the same bit of two words: plain sums with odd factors miss the highest
        words[[7, 90_000]] ^= np.uint64(1 << bit)
        seen.add(mixed_digest(data))
        words[[7, 90_000]] ^= np.uint64(1 << bit)
    words[[5, 60_000]] = words[[60_000, 5]]
    seen.add(mixed_digest(data))
    assert len(seen) == 66


EMULATION = """
#include <cstdio>
#include <vector>
#define __device__
#define __global__
#define __shfl_down_sync(mask, value, lane) 0ULL
struct ulonglong2 { unsigned long long x, y; };
struct Size { unsigned x; } gridDim, blockDim, blockIdx, threadIdx;
static void atomicAdd(unsigned long long* sum, unsigned long long value) { *sum += value; }
%s
int main() {
    std::vector<unsigned long long> data, target;
    unsigned long long word, total[2] = {0, 0};
    while (fread(&word, 8, 1, stdin)) data.push_back(word);
    target.resize(data.size());
    gridDim.x = 3, blockDim.x = 1;
    for (blockIdx.x = 0; blockIdx.x < 3; blockIdx.x++)
        copy_and_sum((ulonglong2*)data.data(), (ulonglong2*)target.data(), data.size() / 2, 1, total);
    printf("mix1-%%016llx%%016llx %%d", total[0], total[1], data == target);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_the_kernel_computes_the_same_as_the_cpu(tmp_path: Path) -> None:
    """The kernel runs as C++ with three threads in sequence; the test below runs it on a GPU."""
    tmp_path.joinpath("kernel.cpp").write_text(EMULATION % _SOURCE)
    subprocess.run(["g++", "-o", "kernel", "kernel.cpp"], cwd=tmp_path, check=True)
    data = np.random.default_rng(1).integers(0, 256, 40_064, dtype=np.uint8)
    printed = subprocess.run([tmp_path / "kernel"], input=data.tobytes(), capture_output=True, check=True).stdout
    assert printed.decode().split() == [mixed_digest(data), "1"]


@pytest.mark.gpu
def test_the_gpu_computes_the_same_as_the_cpu() -> None:
    memory = CudaMemory()
    data = np.random.default_rng(2).integers(0, 256, 50_000_064, dtype=np.uint8)
    source, target = torch.from_numpy(data).to("cuda"), memory.empty(data.nbytes)
    assert memory.digest(source) == memory.copy(source, target) == mixed_digest(data)
    assert torch.equal(source, target)


@pytest.mark.gpu
def test_another_process_stages_from_the_gpu(plane: Plane, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    publisher = open_publisher("job_g", LAYOUT, plane.settings, memory=CudaMemory())
    child = spawn(STAGES, None)
    for version in range(1, 8):
        send(child, publisher.publish(weights(version, "cuda"), version=version, epoch=1))
        assert read_line(child) == f"cuda_ipc cuda {float(version)} {float(version)}"
    publisher.close()


@pytest.mark.long
def test_processes_share_the_stand_in(plane: Plane, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    child = spawn(STAGES, plane.memory.directory)
    for version in range(1, 8):
        send(child, plane.publish(version))
        assert read_line(child) == f"cuda_ipc cpu {float(version)} {float(version)}"
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG) is None
