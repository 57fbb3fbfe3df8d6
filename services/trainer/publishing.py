"""Publishing of policy versions: the learner writes weights into slots, and manifests are announced on the bus.

If a job publishes adapters, each manifest names the digest of the base weights. Base weights that come from the warm
start exist nowhere else, so the trainer publishes them before the first version.

With a promotion gate, the trainer announces every version as a candidate, and the coordinator tells the engines which
version to serve. The served version stays available until the coordinator names another.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from itertools import chain

import msgspec
from torch import Tensor

from penstock.services.trainer.learners.job_learner import JobLearner
from penstock.services.trainer.rank_group import RankGroup
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import Conflict, Fenced, Unavailable, WeightsError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.kv import Entry
from penstock.shared.weights import device_memory, open_publisher
from penstock.shared.weights.open import Publisher

__all__ = ["Publishing"]


RETRY_S = 0.2


class Publishing:
    """Publishes the policy of one job. If ``gated``, the coordinator decides which version the engines serve."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, *, gated: bool = False) -> None:
        self._bus, self._settings, self._job, self._gated = bus, settings, job, gated
        self._publisher: Publisher | None = None
        self._base_publisher: Publisher | None = None
        self._base_manifest: WeightManifest | None = None
        """Manifest of base weights that is to be announced with the next version."""
        self._written: dict[str, WeightManifest] = {}
        """Last manifest of the policy (key: the job) and of its base weights (key: theirs)."""
        self.problem: tuple[float, str] | None = None
        """Start (Unix seconds) and reason for which a transport lacks the last version; None if none does."""
        self._writing = threading.Lock()
        """Held while a version is written: a stopped session calls ``close`` while its thread may still write."""
        self._closed = False

    async def publish(self, rank_group: RankGroup, *, version: int, epoch: int) -> WeightManifest:
        """Copy the weights into a slot and return the manifest, which engines do not see before ``announce``."""
        keep = await self._known(self._job) if self._gated else None
        return await rank_group.publish(partial(self._write, version, epoch, keep, await self._routes()))

    async def announce(self, manifest: WeightManifest) -> None:
        """Announce a version to the engines. Raises Fenced if a later trainer has announced one."""
        if self._base_manifest is not None:
            await self._put(subjects.base_manifest(self._job), self._base_manifest)
            self._base_manifest = None
        await self._put(subjects.candidate_manifest(self._job) if self._gated else self._job, manifest)

    async def complete(self) -> None:
        """Publish the announced version by the transports that failed before; if one succeeds, announce the version
        again.

        Raises Fenced as ``announce``.
        """
        manifest = self._written.get(self._job)
        if manifest is None or not await self.stands(manifest):
            return
        before = dict(self._written)
        keep = await self._known(self._job) if self._gated else None  # another version may be served by now
        await asyncio.to_thread(self._complete, keep)
        if self._written != before:
            await self.announce(self._written[self._job])

    async def announce_served(self, manifest: WeightManifest) -> None:
        """Announce new weights of the version that engines already serve, which a restarted trainer has published
        again. Raises Fenced if a later trainer has announced a version."""
        await self._put(self._job, manifest)

    async def newest(self) -> int:
        """Return the newest version announced to engines, or -1.

        The ledger may not have this version yet, because a trainer can end between announcement and report.
        """
        keys = (self._job, subjects.candidate_manifest(self._job))
        known = [await self._known(key) for key in keys]
        return max((manifest.version for manifest in known if manifest is not None), default=-1)

    async def stands(self, manifest: WeightManifest) -> bool:
        """Return True if ``manifest`` is announced now, either as the served version or as the candidate (the version
        on trial before engines serve it)."""
        keys = (self._job, subjects.candidate_manifest(self._job))
        known = [await self._known(key) for key in keys]
        return any(one is not None and one.created == manifest.created for one in known)

    async def _put(self, key: str, manifest: WeightManifest) -> None:
        """Announce a manifest under ``key`` unless a later trainer has announced another manifest.

        Raises:
            Fenced: a later trainer has announced its own manifest.
        """
        data = pack(manifest, job=self._job, id=str(manifest.version), epoch=manifest.epoch)
        while (entry := await self._entry(key)) is None or entry.value != data:
            known = None if entry is None or entry.value is None else unpack(entry.value, WeightManifest)[0]
            if known is not None and known.epoch > manifest.epoch:
                raise Fenced(f"'{key}' is at a manifest of trainer epoch {known.epoch} > {manifest.epoch}")
            with contextlib.suppress(Conflict):  # another writer changed the key meanwhile
                revision = 0 if entry is None else entry.revision
                await self._bus.kv(subjects.MANIFESTS).update(key, data, revision, deadline_s=30)
                return

    async def _known(self, key: str) -> WeightManifest | None:
        """Return the current manifest under ``key``, or None."""
        entry = await self._entry(key)
        return None if entry is None or entry.value is None else unpack(entry.value, WeightManifest)[0]

    async def _entry(self, key: str) -> Entry | None:
        """Return the entry of a key. Retries while the bus is unavailable."""
        while True:
            try:
                return await self._bus.kv(subjects.MANIFESTS).get(key)
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Wait until no thread writes weights, then stop serving weights. Later calls of ``publish`` fail.

        Published manifests stay on the bus.
        """
        self._closed = True
        with self._writing:
            self.problem = None
            for publisher in (self._publisher, self._base_publisher):
                if publisher is not None:
                    publisher.close()

    @property
    def waiting(self) -> tuple[str, float] | None:
        """Return the reason and the start of the writing thread's current wait for a free slot; None if it does not
        wait. See ``SlotPool.waiting``."""
        return None if self._publisher is None else self._publisher.waiting

    @property
    def transports(self) -> list[str]:
        """Return the transports by which this process can send weights. The coordinator chooses from them."""
        settings = self._settings
        others = [way for way in ("tcp", settings.weight_collective) if way and settings.bulk_host]
        disk = ["disk"] if settings.weight_disk is not None else []
        return [*(["cuda_ipc"] if self.devices else []), "shm", *others, *disk]

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the unique ids of the GPUs that hold published weights; empty before the first version."""
        return () if self._publisher is None else self._publisher.devices

    async def _routes(self) -> WeightRoutes:
        """Return the coordinator's choice of transports; empty before the coordinator has chosen."""
        with contextlib.suppress(Unavailable):
            entry = await self._bus.kv(subjects.MANIFESTS).get(subjects.weight_routes(self._job))
            if entry is not None and entry.value is not None:
                return unpack(entry.value, WeightRoutes)[0]
        return WeightRoutes(epoch=0, transports={})

    def _write(
        self, version: int, epoch: int, keep: WeightManifest | None, routes: WeightRoutes, learner: JobLearner
    ) -> WeightManifest:
        base, weights = learner.take_base(), learner.weights()
        try:
            with self._writing:
                publisher = self._open(learner)
                publisher.open(learner.layout(), routes.members, routes.epoch)
                self._write_base(base, epoch, learner)
                manifest = publisher.publish(weights, version=version, epoch=epoch, keep=keep)
                self._note_problem()
        except Exception:
            with contextlib.suppress(RuntimeError, ValueError):  # if other ranks are lost, keep the first error
                _gather_to_the_end(base, weights)
            raise
        _gather_to_the_end(base, weights)
        self._written[self._job] = msgspec.structs.replace(manifest, base=learner.base_digest)
        return self._written[self._job]

    def _complete(self, keep: WeightManifest | None) -> None:
        """Publish the newest version, and the base weights if any, by the transports that failed before, without
        overwriting the version in ``keep``. Add these transports to the manifests. Blocks."""
        base = subjects.base_manifest(self._job)
        with self._writing:
            for key, publisher, kept in ((base, self._base_publisher, None), (self._job, self._publisher, keep)):
                if self._closed or publisher is None or not (refs := publisher.complete(kept)):
                    continue
                manifest = self._written[key]
                self._written[key] = msgspec.structs.replace(manifest, refs=manifest.refs + refs)
                if key == base:
                    self._base_manifest = self._written[key]
            self._note_problem()

    def _note_problem(self) -> None:
        publishers = [one for one in (self._base_publisher, self._publisher) if one is not None]
        text = next((one.problem for one in publishers if one.problem), "")
        since = bus_time() if self.problem is None else self.problem[0]
        self.problem = (since, text) if text else None

    def _open(self, learner: JobLearner) -> Publisher:
        """Return the publisher of the policy. Raises WeightsError after ``close``."""
        if self._closed:
            raise WeightsError(f"this trainer no longer publishes weights of job '{self._job}'")
        if self._publisher is None:
            memory = device_memory(self._settings)
            self._publisher = open_publisher(self._job, learner.layout(), self._settings, memory=memory)
        return self._publisher

    def _write_base(self, base: Iterator[tuple[str, Tensor]], epoch: int, learner: JobLearner) -> None:
        """Publish the adapter's base weights if ``base`` yields any; engines cannot load these from elsewhere."""
        first = next(base, None)
        if first is None:
            return
        key = subjects.base_manifest(self._job)
        if self._base_publisher is None:
            self._base_publisher = open_publisher(key, learner.base_layout(), self._settings)
        self._base_manifest = self._base_publisher.publish(chain([first], base), version=0, epoch=epoch)
        self._written[key] = self._base_manifest


def _gather_to_the_end(*rest: Iterator[tuple[str, Tensor]]) -> None:
    """Exhaust the iterators: other ranks run all gathers, so this rank must run them too, even after an error."""
    for _ in chain(*rest):
        pass
