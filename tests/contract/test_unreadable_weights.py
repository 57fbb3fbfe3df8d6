"""The error of a version that a worker cannot stage: it says if it helps to publish the version again.

``UnreadableWeights``: it does not, because this worker can use no transport. Any other ``WeightsError``: it does.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import UnreadableWeights, WeightsError
from penstock.shared.protocol.weights import SlotRef, WeightRoutes
from penstock.shared.weights import collective, layout_of, open_publisher, open_receiver
from penstock.shared.weights.open import Receiver
from tests.contract.device_memories import FileMemory

WEIGHTS = {"w": torch.arange(1000.0)}
TRANSPORTS = ("cuda_ipc", "shm", "tcp", "disk")


class Scene:
    """A version that a trainer publishes by every transport that can be pulled from, and a worker that may lack some.

    The methods take a transport away: so that the worker cannot use it, or (``lose_...``) so that the version is gone.
    """

    def __init__(self, directory: Path) -> None:
        for name in ("shm", "disk", "device"):
            directory.joinpath(name).mkdir()
        self.settings = ServiceSettings(
            host_id="a", worker_id="w", shm_dir=directory / "shm", weight_disk=directory / "disk",
            bulk_host="127.0.0.1", weight_collective="gloo",
        )  # fmt: skip
        self.memory = self.worker_memory = FileMemory(directory / "device")
        self.publisher = open_publisher("job_u", layout_of(WEIGHTS.items()), self.settings, memory=self.memory)
        manifest = self.publisher.publish(WEIGHTS.items(), version=1, epoch=1)
        self.manifest, self.refs = manifest, {ref.transport: ref for ref in manifest.refs}

    def stage(self, *transports: str) -> str:
        """Stage the version in a new worker by one of ``transports``, and return which one it was."""
        worker: Receiver = open_receiver(self.settings, memory=self.worker_memory)
        worker.follow("w", WeightRoutes(epoch=1, transports={"w": "gloo"}))
        refs = tuple(self.refs[transport] for transport in transports)
        staged = worker.stage(msgspec.structs.replace(self.manifest, refs=refs))
        staged.release()
        worker.close()
        return staged.way.transport

    def slot(self, transport: str) -> Path:
        return self.settings.shm_dir / self.refs[transport].handle.partition("/")[0]

    def close_slot(self, transport: str = "shm") -> None:
        """Replace the slot by a directory, which nobody can open for writing, not even root."""
        self.slot(transport).unlink()
        self.slot(transport).symlink_to(self.memory.directory)

    def spoil_slot(self) -> None:
        self.slot("shm").unlink()
        self.slot("shm").write_bytes(b"something else")

    def lose_slot(self) -> None:
        self.slot("shm").unlink()

    def close_device_slot(self) -> None:
        self.close_slot("cuda_ipc")

    def lose_device_slot(self) -> None:
        self.slot("cuda_ipc").unlink()

    def remove_device(self) -> None:
        self.worker_memory = FileMemory(self.memory.directory, "GPU-7")

    def stop_trainer(self) -> None:
        self.publisher.close()

    def change_token(self) -> None:
        handle = self.refs["tcp"].handle.rpartition("/")[0] + "/" + "ab" * 32
        self.refs["tcp"] = msgspec.structs.replace(self.refs["tcp"], handle=handle)

    def remove_directory(self) -> None:
        shutil.rmtree(self.settings.weight_disk or "")

    def lose_file(self) -> None:
        assert self.settings.weight_disk is not None
        self.settings.weight_disk.joinpath(self.refs["disk"].handle).unlink()

    def end_broadcasts(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        self.refs["gloo"] = SlotRef("gloo", "a", f"127.0.0.1:{port}/1/0/1", self.manifest.layout.nbytes)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(collective, "MEET_S", 0.3)
    opened = Scene(tmp_path)
    yield opened
    opened.publisher.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_can_use_each_transport_of_the_scene(scene: Scene, transport: str) -> None:
    assert scene.stage(transport) == transport


Break = Callable[[Scene], None]


@pytest.mark.parametrize(
    ("transport", "damage", "kind", "reason"),
    [
        ("shm", Scene.close_slot, UnreadableWeights, "cannot open segment"),
        ("shm", Scene.lose_slot, WeightsError, "there is no segment"),
        ("shm", Scene.spoil_slot, WeightsError, "is not a weight slot"),
        ("tcp", Scene.stop_trainer, UnreadableWeights, "cannot fetch .* refused"),
        ("tcp", Scene.change_token, UnreadableWeights, "refuses the token"),
        ("tcp", Scene.lose_slot, WeightsError, "does not have generation 2 of"),
        ("tcp", Scene.close_slot, WeightsError, "does not have generation 2 of"),
        ("tcp", Scene.spoil_slot, WeightsError, "does not have generation 2 of"),
        ("disk", Scene.remove_directory, UnreadableWeights, "must be the trainer's directory"),
        ("disk", Scene.lose_file, WeightsError, "No such file"),
        ("cuda_ipc", Scene.remove_device, UnreadableWeights, "GPU GPU-7 cannot read memory of GPU GPU-0"),
        ("cuda_ipc", Scene.close_device_slot, UnreadableWeights, "cannot open segment"),
        ("cuda_ipc", Scene.lose_device_slot, WeightsError, "there is no segment"),
        ("cuda_ipc", Scene.stop_trainer, WeightsError, "the process that published it ended"),
        ("gloo", Scene.end_broadcasts, UnreadableWeights, "by gloo"),
    ],
)
def test_the_error_says_if_publishing_again_helps(
    scene: Scene, transport: str, damage: Break, kind: type[WeightsError], reason: str
) -> None:
    damage(scene)
    with pytest.raises(WeightsError, match=reason) as caught:
        scene.stage(transport)
    assert type(caught.value) is kind


CLOSED = {
    "cuda_ipc": Scene.remove_device, "shm": Scene.close_slot, "tcp": Scene.change_token, "disk": Scene.remove_directory,
}  # fmt: skip
LOST = {"cuda_ipc": Scene.lose_device_slot, "shm": Scene.lose_slot, "disk": Scene.lose_file}
"""For TCP nothing more is to be done: the trainer cannot serve a slot that is closed."""


@pytest.mark.parametrize("lost", ["", *TRANSPORTS])
def test_one_lost_transport_is_reason_enough_to_ask_the_trainer(scene: Scene, lost: str) -> None:
    """All transports fail; all but ``lost`` would fail again if the version were published again."""
    for transport in TRANSPORTS:
        if transport != lost:
            CLOSED[transport](scene)
    if lost in LOST:
        LOST[lost](scene)
    with pytest.raises(WeightsError, match=r"cannot stage version 1 of job 'job_u': .*;.*;.*;") as caught:
        scene.stage(*TRANSPORTS)
    assert type(caught.value) is (WeightsError if lost else UnreadableWeights)
