"""The trainer's end of the weight plane: slots filled by the learner, manifests announced on the bus.

A job that publishes adapters names with every version the weights that these belong to. Where the warm start made them,
so that no engine can load them by itself, they are published before the first version.
"""

from __future__ import annotations

import weakref
from functools import partial

import msgspec

from penstock.services.trainer.crew import Crew
from penstock.services.trainer.learner import Learner
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import WeightPublisher, digest_of_tensors, layout_of, open_publisher

__all__ = ["Publishing"]


class Publishing:
    """Publishes the policy of one job."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str) -> None:
        self._bus, self._settings, self._job = bus, settings, job
        self._publisher: WeightPublisher | None = None
        self._base_publisher: WeightPublisher | None = None
        self._learner: weakref.ref[Learner] | None = None
        """Whose base was published; the models of a learner that is gone must not live on here."""
        self._base = ""
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
        weights = learner.weights()
        try:
            if self._publisher is None:
                self._publisher = open_publisher(self._job, learner.layout(), self._settings)
            if self._learner is None or self._learner() is not learner:
                self._learner, self._base = weakref.ref(learner), ""
                if learner.publishes_adapter:
                    self._base = self._write_base(learner, epoch)
            manifest = self._publisher.publish(weights, version=version, epoch=epoch)
            return msgspec.structs.replace(manifest, base=self._base)
        finally:
            for _ in weights:  # other ranks gather to the end, whatever became of it here
                pass

    def _write_base(self, learner: Learner, epoch: int) -> str:
        """The digest of the weights under the adapter; they are published where only this job has them."""
        if not learner.made_base:
            return digest_of_tensors(learner.frozen())
        if self._base_publisher is None:
            layout = layout_of(learner.frozen())
            self._base_publisher = open_publisher(subjects.base_manifest(self._job), layout, self._settings)
        self._base_manifest = self._base_publisher.publish(learner.frozen(), version=0, epoch=epoch)
        return self._base_manifest.digest
