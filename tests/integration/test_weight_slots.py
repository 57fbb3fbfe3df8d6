"""Weight slots among real processes that stop, die and are replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import DeadlineError, Fenced, NotFound, Unavailable, WeightsError
from penstock.shared.protocol.weights import Layout, WeightManifest, make_layout, slot_name
from penstock.shared.transport.bulk_segment import Segment
from penstock.shared.weights.shm import ShmPublisher, ShmReceiver

LAYOUT = make_layout([("w", "float32", (1000, 30)), ("b", "bfloat16", (17,))])
JOB = "job_s"

HOLDER = """
import sys, msgspec, torch
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.weights.shm import ShmReceiver
torch.set_num_threads(1)
manifest = msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=WeightManifest)
staged = ShmReceiver(ServiceSettings(host_id="h", shm_dir=Path(sys.argv[1]))).stage(manifest)
for line in sys.stdin if print("staged", flush=True) is None else ():
    values = staged.tensors()["w"]
    print(float(values.min()), float(values.max()), staged.intact(), flush=True)
"""

WRITER = """
import os, signal, sys, torch
from pathlib import Path
from penstock.shared.config import ServiceSettings
from penstock.shared.protocol.weights import make_layout
from penstock.shared.weights.shm import ShmPublisher
layout = make_layout([("w", "float32", (1000, 30)), ("b", "bfloat16", (17,))])
def tensors():
    yield "w", torch.full((1000, 30), 7.0)
    os.kill(os.getpid(), signal.SIGKILL)
    yield "b", torch.zeros(17, dtype=torch.bfloat16)
settings = ServiceSettings(host_id="h", shm_dir=Path(sys.argv[1]))
ShmPublisher("job_s", layout, settings).publish(tensors(), version=2, epoch=1)
"""


def weights(value: float) -> list[tuple[str, Tensor]]:
    return [("w", torch.full((1000, 30), float(value))), ("b", torch.full((17,), value, dtype=torch.bfloat16))]


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(host_id="h", shm_dir=tmp_path)


@pytest.fixture
def make(settings: ServiceSettings) -> Iterator[Callable[..., ShmPublisher]]:
    made = []

    def publisher(layout: Layout = LAYOUT, timeout_s: float = 0.3, max_slots: int = 3) -> ShmPublisher:
        made.append(ShmPublisher(JOB, layout, settings, slots=2, max_slots=max_slots, timeout_s=timeout_s))
        return made[-1]

    yield publisher
    for each in made:
        each.close()


@pytest.fixture
def hold(settings: ServiceSettings) -> Iterator[Callable[[WeightManifest], subprocess.Popen[str]]]:
    processes = []

    def start(manifest: WeightManifest) -> subprocess.Popen[str]:
        wired = msgspec.msgpack.encode(manifest).hex()
        command = [sys.executable, "-c", HOLDER, str(settings.shm_dir), wired]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "staged\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ask(process: subprocess.Popen[str]) -> str:
    """Return the holder's report of the values in its slot."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("look\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def slots(settings: ServiceSettings) -> list[str]:
    return sorted(path.name.rpartition(".")[2] for path in settings.shm_dir.iterdir())


@pytest.mark.long
def test_slot_of_a_stopped_process_is_never_overwritten(
    make: Callable[..., ShmPublisher],
    hold: Callable[[WeightManifest], subprocess.Popen[str]],
    settings: ServiceSettings,
) -> None:
    publisher = make()
    holder = hold(publisher.publish(weights(1), version=1, epoch=1))
    os.kill(holder.pid, signal.SIGSTOP)
    for version in range(2, 12):
        publisher.publish(weights(version), version=version, epoch=1)
    assert slots(settings) == ["0", "1", "2"]  # one more slot; later versions use the other two in turn
    os.kill(holder.pid, signal.SIGCONT)
    assert ask(holder) == "1.0 1.0 True"


@pytest.mark.long
def test_waiting_for_a_slot_names_the_process_that_holds_it(
    make: Callable[..., ShmPublisher], hold: Callable[[WeightManifest], subprocess.Popen[str]]
) -> None:
    publisher = make(max_slots=2)
    holder = hold(publisher.publish(weights(1), version=1, epoch=1))
    publisher.publish(weights(2), version=2, epoch=1)
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(DeadlineError, match=rf"process {holder.pid} \(stopped\)"):
        publisher.publish(weights(3), version=3, epoch=1)


@pytest.mark.long
def test_slot_of_a_killed_process_is_free_at_once(
    make: Callable[..., ShmPublisher],
    hold: Callable[[WeightManifest], subprocess.Popen[str]],
    settings: ServiceSettings,
) -> None:
    publisher = make(max_slots=2, timeout_s=0.0)
    holder = hold(publisher.publish(weights(1), version=1, epoch=1))
    publisher.publish(weights(2), version=2, epoch=1)
    with pytest.raises(DeadlineError):
        publisher.publish(weights(3), version=3, epoch=1)
    holder.kill()
    holder.wait()
    manifest = publisher.publish(weights(3), version=3, epoch=1)
    assert slots(settings) == ["0", "1"]
    assert float(ShmReceiver(settings).stage(manifest).tensors()["w"][0, 0]) == 3


def test_tensors_keep_their_slot_when_the_staged_object_is_forgotten(
    make: Callable[..., ShmPublisher], settings: ServiceSettings
) -> None:
    publisher = make()
    tensors = ShmReceiver(settings).stage(publisher.publish(weights(1), version=1, epoch=1)).tensors()
    for version in range(2, 6):
        publisher.publish(weights(version), version=version, epoch=1)
    assert float(tensors["w"].min()) == float(tensors["w"].max()) == 1


def test_crash_of_the_writer_is_never_staged_and_its_slots_are_reused(
    make: Callable[..., ShmPublisher], settings: ServiceSettings
) -> None:
    first = make()
    whole = first.publish(weights(1), version=1, epoch=1)
    first.close()
    writer = subprocess.run([sys.executable, "-c", WRITER, str(settings.shm_dir)], check=False)
    assert writer.returncode == -signal.SIGKILL
    torn = msgspec.structs.replace(whole, version=2, refs=tuple(
        msgspec.structs.replace(ref, handle=slot_name(JOB, 1)) for ref in whole.refs))  # fmt: skip
    with pytest.raises(WeightsError, match="being written, or its writer died"):
        ShmReceiver(settings).stage(torn)
    assert float(ShmReceiver(settings).stage(whole).tensors()["w"][0, 0]) == 1
    successor = make()
    manifest = successor.publish(weights(3), version=2, epoch=2)
    assert float(ShmReceiver(settings).stage(manifest).tensors()["w"][0, 0]) == 3


def test_replaced_publisher_is_fenced(make: Callable[..., ShmPublisher], settings: ServiceSettings) -> None:
    old, new = make(), make()
    old.publish(weights(1), version=1, epoch=1)
    manifest = new.publish(weights(2), version=2, epoch=2)
    with pytest.raises(Fenced, match="epoch 2"):
        old.publish(weights(3), version=3, epoch=1)
    assert ShmReceiver(settings).stage(manifest).intact()


def test_the_version_that_is_served_keeps_its_slot(
    make: Callable[..., ShmPublisher], settings: ServiceSettings
) -> None:
    """With promotion, an older version is served while newer ones are tried."""
    publisher = make()
    served = publisher.publish(weights(1), version=1, epoch=1)
    for version in range(2, 8):
        publisher.publish(weights(version), version=version, epoch=1, keep=served)
    assert float(ShmReceiver(settings).stage(served).tensors()["w"][0, 0]) == 1


def test_another_host_cannot_fetch_an_overwritten_version(make: Callable[..., ShmPublisher]) -> None:
    publisher = make()
    names = [publisher.publish(weights(version), version=version, epoch=1).refs[0].handle for version in range(1, 4)]
    assert names[2] == names[0] != names[1], "slots are reused in turn"
    with publisher._serve(names[0], 4) as blob:
        assert blob.nbytes == LAYOUT.nbytes
        assert blob.data is not None, "it is mapped already"
        values = blob.data[: 4 * 30_000].view(np.float32)
        assert values.min() == values.max() == 3
    with pytest.raises(NotFound, match="was written anew"), publisher._serve(names[0], 2):
        pass


def test_intact_notices_a_writer(make: Callable[..., ShmPublisher], settings: ServiceSettings) -> None:
    publisher = make()
    staged = ShmReceiver(settings).stage(publisher.publish(weights(1), version=1, epoch=1))
    assert staged.intact()
    staged.release()
    publisher.publish(weights(2), version=2, epoch=1)
    assert staged.intact()
    publisher.publish(weights(3), version=3, epoch=1)
    assert not staged.intact()


def test_other_size_is_replaced_but_not_while_it_is_used(
    make: Callable[..., ShmPublisher], settings: ServiceSettings
) -> None:
    small = make_layout([("w", "float32", (4,))])
    before = make(small)
    serving = ShmReceiver(settings).stage(before.publish([("w", torch.ones(4))], version=1, epoch=1))
    before.close()
    (settings.shm_dir / slot_name(JOB, 7)).touch()  # a creator that died at once
    after = make()
    assert slots(settings) == ["0", "1", "2"]
    after.publish(weights(2), version=2, epoch=2)
    after.publish(weights(3), version=3, epoch=2)
    assert torch.equal(serving.tensors()["w"], torch.ones(4))


def test_header_must_match_the_manifest(make: Callable[..., ShmPublisher], settings: ServiceSettings) -> None:
    manifest = make().publish(weights(1), version=1, epoch=1)
    for changes in ({"version": 9}, {"epoch": 9}):
        with pytest.raises(WeightsError, match="holds version 1 of epoch 1"):
            ShmReceiver(settings).stage(msgspec.structs.replace(manifest, **changes))


@pytest.mark.parametrize(
    "handle", ["../secret", "/etc/passwd", "penstock-weights-other.0", "penstock-weights-job_s.99"]
)
def test_handles_of_strangers_are_refused(
    make: Callable[..., ShmPublisher], settings: ServiceSettings, handle: str
) -> None:
    manifest = make().publish(weights(1), version=1, epoch=1)
    ref = msgspec.structs.replace(manifest.refs[0], handle=handle)
    with pytest.raises(WeightsError, match=r"not a slot|no segment"):
        ShmReceiver(settings).stage(msgspec.structs.replace(manifest, refs=(ref,)))


def test_writing_to_staged_tensors_harms_nobody(make: Callable[..., ShmPublisher], settings: ServiceSettings) -> None:
    publisher, receiver = make(max_slots=2), ShmReceiver(settings)
    manifest = publisher.publish(weights(1), version=1, epoch=1)
    careless = receiver.stage(manifest)
    careless.tensors()["w"].fill_(99)
    assert float(ShmReceiver(settings).stage(manifest).tensors()["w"].max()) == 1
    careless.release()
    assert float(receiver.stage(manifest).tensors()["w"].max()) == 1


def test_layout_of_the_wire_cannot_reach_outside(make: Callable[..., ShmPublisher], settings: ServiceSettings) -> None:
    manifest = make().publish(weights(1), version=1, epoch=1)
    spec = manifest.layout.tensors[0]
    for bad in (
        msgspec.structs.replace(spec, offset=1 << 40),
        msgspec.structs.replace(spec, shape=(-1000, -30)),
        msgspec.structs.replace(spec, dtype="object"),
        msgspec.structs.replace(spec, shape=(1000, 31)),
    ):
        layout = msgspec.structs.replace(manifest.layout, tensors=(bad, manifest.layout.tensors[1]))
        with pytest.raises(WeightsError, match="layout"):
            ShmReceiver(settings).stage(msgspec.structs.replace(manifest, layout=layout))


def test_full_directory_is_an_error_and_not_a_crash(settings: ServiceSettings) -> None:
    with pytest.raises(Unavailable, match="no room for"):
        Segment.create(settings.shm_dir / "x", 1 << 60)
    assert not (settings.shm_dir / "x").exists()
