"""Tells the engines of a job which version to serve: what the ledger promoted, once its weights are there.

The trainer of a job with a promotion gate announces its versions as candidates. The leader copies the manifest of the
one that was promoted to where engines look, so what they serve follows from the ledger and is repeated by any leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.services.coordinator.promotion import PromotionGate
from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import Promoted
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus

__all__ = ["Pointer"]

logger = logging.getLogger(__name__)

LOOK_S = 0.1
DEADLINE_S = 5.0


class Pointer:
    """Follows candidates and promotions of one job.

    Args:
        promoted: what the ledger promoted last.
    """

    def __init__(self, bus: Bus, job: str, gate: PromotionGate, promoted: Callable[[], Promoted | None]) -> None:
        self._bus, self._job, self._gate, self._promoted = bus, job, gate, promoted
        self._candidate: tuple[WeightManifest, bytes] | None = None
        self._told: WeightManifest | None = None

    async def follow(self) -> None:
        """Until cancelled."""
        self._told = await self._standing()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            while True:
                await self._tell()
                await asyncio.sleep(LOOK_S)

    async def _standing(self) -> WeightManifest | None:
        """What an earlier leader told them."""
        while True:
            try:
                entry = await self._bus.kv(subjects.MANIFESTS).get(self._job)
            except Unavailable as error:
                logger.info("%s: what is served is not known yet: %s", self._job, error)
                await asyncio.sleep(LOOK_S)
            else:
                return None if entry is None or entry.value is None else unpack(entry.value, WeightManifest)[0]

    async def _watch(self) -> None:
        async for entry in self._bus.kv(subjects.MANIFESTS).watch(subjects.candidate_manifest(self._job)):
            if entry.value is not None:
                self._candidate = unpack(entry.value, WeightManifest)[0], entry.value

    async def _tell(self) -> None:
        promoted = self._promoted()
        if promoted is None:
            return
        if self._candidate is not None and self._candidate[0].version == promoted.version:
            manifest, data = self._candidate
            if manifest != self._told:
                try:
                    await self._bus.kv(subjects.MANIFESTS).put(self._job, data, deadline_s=DEADLINE_S)
                except Unavailable as error:
                    logger.warning("%s: engines are not told of version %d yet: %s", self._job, manifest.version, error)
                    return
                self._told = manifest
        if self._told is not None and self._told.version == promoted.version:
            self._gate.announced = promoted.version
