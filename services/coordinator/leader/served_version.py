"""Publishes the version that engines serve: the promoted version of the ledger, once its weights exist.

The trainer of a job with a promotion gate announces its versions as candidates. The leader copies the manifest of the
promoted one to the key that engines watch. The served version is derived from the ledger, so any leader can repeat it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from penstock.shared.errors import Conflict, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import Promoted
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.transport.bus import Bus

__all__ = ["ServedVersionPublisher"]

logger = logging.getLogger(__name__)
POLL_S = 0.1
DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Announced:
    """A weight manifest, and its bytes in the bucket."""

    manifest: WeightManifest
    data: bytes

    @property
    def version(self) -> int:
        return self.manifest.version


class ServedVersionPublisher:
    """Publishes the promoted versions of one job to the engines. Watches two manifests: that of the newest candidate, a
    trained version that may be promoted, and that of the served version.

    Served versions only rise, in the ledger and in the bucket. If an earlier leader or trainer writes an older version,
    this leader sees it and replaces it.

    Args:
        promoted: returns the newest promotion in the ledger.
        on_announced: receives the promoted version when the manifest that engines watch contains it.
    """

    def __init__(
        self, bus: Bus, job: str, promoted: Callable[[], Promoted | None], on_announced: Callable[[int], None]
    ) -> None:
        self._bus, self._job, self._promoted, self._on_announced = bus, job, promoted, on_announced
        self._candidate: _Announced | None = None
        self._standing: _Announced | None = None
        """Manifest that the bucket contains for the served version; ``_revision`` is the revision of its entry."""
        self._revision = 0
        self._served: _Announced | None = None
        """The newest manifest of the promoted version."""

    async def follow(self) -> None:
        """Publish promoted versions until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            while True:
                await self._publish()
                await asyncio.sleep(POLL_S)

    async def _watch(self) -> None:
        """Watch the manifests of the served version and of the newest candidate version. One watch covers both keys,
        because the candidate's key lies below the key of the served version."""
        async with contextlib.aclosing(self._bus.kv(subjects.MANIFESTS).watch(self._job)) as entries:
            async for entry in entries:
                announced = (
                    None if entry.value is None else _Announced(unpack(entry.value, WeightManifest)[0], entry.value)
                )
                if entry.key == self._job:
                    if entry.revision >= self._revision:
                        self._standing, self._revision = announced, entry.revision
                elif entry.key == subjects.candidate_manifest(self._job) and announced is not None:
                    self._candidate = announced
                self._take_served()

    def _take_served(self) -> None:
        """Keep the manifest of the promoted version, because later candidates replace it in the bucket. If several
        trainers wrote one, keep that of the newest trainer."""
        promoted = self._promoted()
        known = (self._candidate, self._standing, self._served)
        fitting = [one for one in known if one is not None and promoted is not None and one.version == promoted.version]
        self._served = max(fitting, key=lambda one: one.manifest.epoch, default=None)

    async def _publish(self) -> None:
        self._take_served()
        served, standing = self._served, self._standing
        if served is None:
            return
        if standing is not None and standing.version > served.version:  # a later leader has published it
            return
        if standing is not None and standing.manifest == served.manifest:
            self._on_announced(served.version)
            return
        kv = self._bus.kv(subjects.MANIFESTS)
        try:
            revision = await kv.update(self._job, served.data, self._revision, deadline_s=DEADLINE_S)
        except Conflict:  # the watch will deliver the other write
            return
        except Unavailable as error:
            logger.warning("%s: version %d is not published to engines yet: %s", self._job, served.version, error)
            return
        if revision > self._revision:
            self._standing, self._revision = served, revision
            self._on_announced(served.version)
