"""Tells the engines of a job which version to serve: what the ledger promoted, once its weights are there.

The trainer of a job with a promotion gate announces its versions as candidates. The leader copies the manifest of the
one that was promoted to where engines look, so what they serve follows from the ledger and is repeated by any leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from penstock.services.coordinator.promotion import PromotionGate
from penstock.shared.errors import Conflict, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import Promoted
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus

__all__ = ["Pointer"]

logger = logging.getLogger(__name__)

LOOK_S = 0.1
DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Told:
    """A manifest, and as it stands in its bucket."""

    manifest: WeightManifest
    data: bytes

    @property
    def version(self) -> int:
        return self.manifest.version


class Pointer:
    """Follows candidates and promotions of one job.

    Versions only rise, in the ledger and so in what engines are told. Whoever may still write where they look, a leader
    or a trainer of before, is corrected: what stands there is watched, and replaced where it is older.

    Args:
        promoted: what the ledger promoted last.
    """

    def __init__(self, bus: Bus, job: str, gate: PromotionGate, promoted: Callable[[], Promoted | None]) -> None:
        self._bus, self._job, self._gate, self._promoted = bus, job, gate, promoted
        self._candidate: Told | None = None
        self._standing: Told | None = None
        """The version that engines serve now, and its revision."""
        self._revision = 0
        self._served: Told | None = None
        """The newest manifest of the version that was promoted."""

    async def follow(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            while True:
                await self._tell()
                await asyncio.sleep(LOOK_S)

    async def _watch(self) -> None:
        """Both keys: that of the candidates lies below the other."""
        async with contextlib.aclosing(self._bus.kv(subjects.MANIFESTS).watch(self._job)) as entries:
            async for entry in entries:
                told = None if entry.value is None else Told(unpack(entry.value, WeightManifest)[0], entry.value)
                if entry.key == self._job:
                    if entry.revision >= self._revision:
                        self._standing, self._revision = told, entry.revision
                elif entry.key == subjects.candidate_manifest(self._job) and told is not None:
                    self._candidate = told
                self._take_served()

    def _take_served(self) -> None:
        """Keep the manifest of the promoted version by the latest trainer, whatever becomes of its key."""
        promoted = self._promoted()
        known = (self._candidate, self._standing, self._served)
        fitting = [one for one in known if one is not None and promoted is not None and one.version == promoted.version]
        self._served = max(fitting, key=lambda one: one.manifest.epoch, default=None)

    async def _tell(self) -> None:
        self._take_served()
        served, standing = self._served, self._standing
        if served is None:
            return
        if standing is not None and standing.version > served.version:  # told by a leader after this one
            return
        if standing is not None and standing.manifest == served.manifest:
            self._gate.announced = served.version
            return
        kv = self._bus.kv(subjects.MANIFESTS)
        try:
            revision = await kv.update(self._job, served.data, self._revision, deadline_s=DEADLINE_S)
        except Conflict:  # somebody wrote meanwhile, which the watch brings
            return
        except Unavailable as error:
            logger.warning("%s: engines are not told of version %d yet: %s", self._job, served.version, error)
            return
        if revision > self._revision:
            self._standing, self._revision = served, revision
            self._gate.announced = served.version
