"""Weights of earlier versions, which a rollout worker holds after it stops serving them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.services.rollout.held_weights import WeightRing
from penstock.shared.config import ServiceSettings
from penstock.shared.weights import Staged, WeightReceiver, cleanup, layout_of, open_publisher, open_receiver
from penstock.shared.weights.open import Publisher


def weights(version: int) -> list[tuple[str, Tensor]]:
    return [("a", torch.full((3,), float(version))), ("b", torch.full((2, 2), -float(version)))]


class Plane:
    """A publisher of versions, and a receiver on the same host that stages them."""

    def __init__(self, publisher: Publisher, receiver: WeightReceiver) -> None:
        self.publisher, self.receiver = publisher, receiver

    def stage(self, version: int) -> Staged:
        return self.receiver.stage(self.publisher.publish(weights(version), version=version, epoch=1))


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    settings = ServiceSettings(host_id="h", shm_dir=tmp_path, data_dir=tmp_path / "data")
    publisher = open_publisher("job_held", layout_of(weights(0)), settings)
    yield Plane(publisher, open_receiver(settings))
    publisher.close()
    cleanup("job_held", settings)


def test_the_newest_versions_stay_when_their_slots_are_given_back(plane: Plane) -> None:
    ring = WeightRing(2)
    for version in range(6):
        staged = plane.stage(version)
        assert ring.keep(staged)
        staged.release()
    assert [version for version in range(6) if ring.find(version) is not None] == [4, 5]
    for version in (4, 5):
        held = ring.find(version)
        assert held is not None
        assert held.version == version
        assert {name: tensor.unique().tolist() for name, tensor in held.tensors.items()} == {
            "a": [version], "b": [-version],
        }  # fmt: skip


def test_an_overwritten_version_is_not_held(plane: Plane) -> None:
    ring = WeightRing(2)
    staged = plane.stage(1)
    staged.release()
    for version in (2, 3, 4):
        plane.stage(version).release()
    assert not staged.intact()
    assert not ring.keep(staged)
    assert ring.find(1) is None


def test_nothing_is_copied_where_nothing_is_held(plane: Plane) -> None:
    ring = WeightRing(0)
    assert not ring.keep(plane.stage(1))
    assert ring.find(1) is None
