"""The trainer's end of the weight plane: slots filled by the learner, manifests announced on the bus.

A job that publishes adapters names with every version the weights that these belong to. Where the warm start made them,
so that no engine can load them by itself, they are published before the first version.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

import msgspec
from torch import Tensor

from penstock.services.trainer.crew import Crew
from penstock.services.trainer.learner import Learner
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import WeightPublisher, open_publisher

__all__ = ["Publishing"]


class Publishing:
    """Publishes the policy of one job."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str) -> None:
        self._bus, self._settings, self._job = bus, settings, job
        self._publisher: WeightPublisher | None = None
        self._base_publisher: WeightPublisher | None = None
        self._base_manifest: WeightManifest | None = None

    async def publish(self, crew: Crew, *, version: int, epoch: int) -> WeightManifest:
        """Copy the weights out; nobody knows of them until they are announced."""
        return await crew.publish(partial(self._write, version, epoch))

    async def announce(self, manifest: WeightManifest) -> None:
        """Tell the engines."""
        if self._base_manifest is not None:
            key, base = subjects.base_manifest(self._job), self._base_manifest
            data = pack(base, job=self._job, id=key, epoch=base.epoch)
            await self._bus.kv(subjects.MANIFESTS).put(key, data, deadline_s=30)
            self._base_manifest = None
        data = pack(manifest, job=self._job, id=str(manifest.version), epoch=manifest.epoch)
        await self._bus.kv(subjects.MANIFESTS).put(self._job, data, deadline_s=30)

    def close(self) -> None:
        """Stop serving; what was published stays."""
        for publisher in (self._publisher, self._base_publisher):
            if publisher is not None:
                publisher.close()

    def _write(self, version: int, epoch: int, learner: Learner) -> WeightManifest:
        base, weights = learner.take_base(), learner.weights()
        try:
            if self._publisher is None:
                self._publisher = open_publisher(self._job, learner.layout(), self._settings)
            self._write_base(base, epoch, learner)
            manifest = self._publisher.publish(weights, version=version, epoch=epoch)
            return msgspec.structs.replace(manifest, base=learner.base_digest)
        finally:
            for _ in chain(base, weights):  # other ranks gather to the end, whatever became of it here
                pass

    def _write_base(self, base: Iterator[tuple[str, Tensor]], epoch: int, learner: Learner) -> None:
        """Publish the weights under the adapter where only this job has them."""
        first = next(base, None)
        if first is None:
            return
        if self._base_publisher is None:
            key = subjects.base_manifest(self._job)
            self._base_publisher = open_publisher(key, learner.base_layout(), self._settings)
        self._base_manifest = self._base_publisher.publish(chain([first], base), version=0, epoch=epoch)
