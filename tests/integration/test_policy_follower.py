"""A worker's engine follows the versions that a trainer announces, and lets go of them with the job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.policy import PolicyFollower
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models.loading import build_tokenizer
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import layout_of, open_publisher
from penstock.shared.weights.open import Publisher

JOB = "job_follow"
MODEL = ModelConfig.model_validate(
    {"config": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}, "tokenizer": "char"}
)


class Trainer:
    """Publishes the weights of a seed under any version and epoch."""

    def __init__(self, bus: Bus, settings: ServiceSettings, names: dict[str, Tensor]) -> None:
        self.bus, self.settings, self.names = bus, settings, names
        self.publishers: dict[int, Publisher] = {}

    def publish(self, version: int, *, epoch: int) -> WeightManifest:
        if epoch not in self.publishers:
            self.publishers[epoch] = open_publisher(JOB, layout_of(self.names.items()), self.settings)
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
async def following(bus: Bus, settings: ServiceSettings) -> AsyncIterator[tuple[PolicyFollower, Trainer]]:
    tokenizer = build_tokenizer(MODEL)
    engine = open_engine(MODEL, tokenizer, max_running=2, seed=0, device="cpu")
    names = {name: tensor.detach().clone() for name, tensor in engine._policy_parameters().items()}  # type: ignore[attr-defined]
    await engine.start()
    follower, trainer = PolicyFollower(bus, settings, JOB, engine), Trainer(bus, settings, names)
    task = asyncio.create_task(follower.run())
    try:
        yield follower, trainer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()
        trainer.close()


async def reach(follower: PolicyFollower, version: int, epoch: int) -> None:
    async with asyncio.timeout(60):
        while (follower.version, follower.epoch) != (version, epoch):
            await asyncio.sleep(0.01)


async def test_the_version_of_a_replaced_trainer_is_not_even_tried(
    bus: Bus, settings: ServiceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """What a fenced trainer shows late is refused by its epoch alone, though its version is higher."""
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
