"""Broadcasts of weights: members receive a whole version, by broadcast or another transport, and never a part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.shared.config import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import Staged, collective, layout_of, open_publisher, open_receiver
from penstock.shared.weights.collective import CollectivePublisher, CollectiveReceiver, _Offer
from penstock.shared.weights.open import Receiver

JOB = "job_c"


def weights(version: int) -> dict[str, Tensor]:
    return {"w": torch.full((3_000_000,), float(version)), "b": torch.full((7,), float(-version), dtype=torch.bfloat16)}


class Plane:
    """A trainer that may broadcast weights, and workers on other hosts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.joinpath("trainer").mkdir()
        self.layout = layout_of(weights(0).items())
        self.publisher = open_publisher(JOB, self.layout, self._settings("trainer", bulk_host="127.0.0.1"))
        self.workers: dict[str, Receiver] = {}
        self.threads = ThreadPoolExecutor(8)

    def _settings(self, name: str, **values: str) -> ServiceSettings:
        return ServiceSettings(
            host_id=name, worker_id=name, shm_dir=self.directory / name, weight_collective="gloo", **values
        )  # fmt: skip

    def route(self, epoch: int, members: Sequence[str]) -> None:
        """Give trainer and workers the members of a broadcast, as the coordinator does."""
        routes = WeightRoutes(epoch=epoch, transports=dict.fromkeys(members, "gloo"))
        self.publisher.open(self.layout, routes.members, epoch)
        for name in members:
            self.directory.joinpath(name).mkdir(exist_ok=True)
            self.workers.setdefault(name, open_receiver(self._settings(name))).follow(name, routes)

    def publish(self, version: int) -> WeightManifest:
        return self.publisher.publish(weights(version).items(), version=version, epoch=1)

    def stage(self, manifest: WeightManifest, names: Sequence[str]) -> list[Staged]:
        return list(self.threads.map(lambda name: self.workers[name].stage(manifest), names))

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.publisher.close()
        self.threads.shutdown()


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 1 << 20)
    opened = Plane(tmp_path)
    yield opened
    opened.close()


def check(staged: Sequence[Staged], version: int, transport: str) -> None:
    for one in staged:
        assert {name: tensor.unique().tolist() for name, tensor in one.tensors().items()} == {
            "w": [version], "b": [-version],
        }  # fmt: skip
        assert (one.manifest.version, one.way.transport) == (version, transport)
        one.release()


def test_members_come_and_go_between_versions(plane: Plane) -> None:
    memberships = [["a", "b"], ["a", "b"], ["a", "b", "c"], ["b", "c"], ["c"]]
    epoch = 0
    for version, members in enumerate(memberships, 1):
        epoch += members != memberships[version - 2] or version == 1
        plane.route(epoch, members)
        check(plane.stage(plane.publish(version), members), version, "gloo")
    left = plane.workers["a"]
    assert left.stage(plane.publish(9)).way.transport == "tcp", "no member any more"


@pytest.mark.long
def test_where_a_member_does_not_come_the_others_go_another_way(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "MEET_S", 1.0)
    plane.route(1, ["a", "b", "dead"])
    began = time.monotonic()
    check(plane.stage(plane.publish(1), ["a", "b"]), 1, "tcp")
    assert time.monotonic() - began < 20
    check(plane.stage(plane.publish(2), ["a", "b"]), 2, "tcp")  # the group rests
    plane.route(2, ["a", "b"])
    check(plane.stage(plane.publish(3), ["a", "b"]), 3, "gloo")


@pytest.mark.long
def test_a_member_that_is_lost_in_the_middle_mixes_nothing(plane: Plane) -> None:
    plane.route(1, ["a", "b", "c"])
    check(plane.stage(plane.publish(1), ["a", "b", "c"]), 1, "gloo")
    manifest = plane.publish(2)
    lost = plane.workers["c"]._receivers["gloo"]
    assert isinstance(lost, CollectiveReceiver)

    def dies() -> None:
        ref = next(ref for ref in manifest.refs if ref.transport == "gloo")
        lost._enter(_Offer.read(ref))
        lost._leave()

    dying = plane.threads.submit(dies)
    check(plane.stage(manifest, ["a", "b"]), 2, "tcp")
    dying.result(30)
    plane.route(2, ["a", "b"])
    check(plane.stage(plane.publish(3), ["a", "b"]), 3, "gloo")


def test_received_weights_are_verified(plane: Plane) -> None:
    """A receiver refuses broadcast bytes that do not match the digest of the manifest."""

    @contextmanager
    def damaged() -> Iterator[NDArray[np.uint8]]:
        data = np.zeros(plane.layout.nbytes, np.uint8)
        data[1000] = 4
        yield data

    publisher = CollectivePublisher("127.0.0.1")
    publisher.open(plane.layout, ["a"], 1)
    manifest, ref = plane.publish(1), publisher.offer(damaged)
    assert ref is not None
    receiver = CollectiveReceiver("a")
    receiver.join(["a"], 1)
    with pytest.raises(WeightsError, match="do not match digest"):
        receiver.stage(
            WeightManifest(**{**{name: getattr(manifest, name) for name in manifest.__struct_fields__}, "refs": (ref,)})
        )
    receiver.close()
    publisher.close()


@pytest.mark.gpu
def test_nccl_sends_what_gloo_sends() -> None:
    """With one GPU the only member is the publisher's own rank: buckets go through the GPU and back."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    group = collective._Group("nccl", PrefixStore("g", store), 0, 1, address="127.0.0.1")
    data = np.arange(5_000_000, dtype=np.uint32).view(np.uint8)
    before = data.copy()
    group.broadcast(data)
    group.close()
    assert np.array_equal(data, before)


@pytest.mark.long
def test_a_slot_that_is_gone_ends_its_broadcast(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    """The member learns from TCP that the version is gone, and the group rests."""
    plane.route(1, ["a"])
    manifest = plane.publish(1)  # the broadcast waits for the member
    slot = next(ref.handle for ref in manifest.refs if ref.transport == "shm")
    plane.directory.joinpath("trainer", slot).unlink()
    with pytest.raises(WeightsError, match=r"version 1 by gloo: .*does not have generation"):
        plane.stage(manifest, ["a"])
    assert "the broadcast of weights to a broke: there is no segment" in caplog.text
    check(plane.stage(plane.publish(2), ["a"]), 2, "tcp")
