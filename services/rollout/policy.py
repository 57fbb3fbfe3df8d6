"""Keeps one engine at the newest policy: stages each version while the engine serves, commits at a token boundary."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from penstock.services.rollout.engines import Updatable, UpdatableByReference
from penstock.services.rollout.held_weights import WeightRing
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import DeadlineError, Unavailable, UnreadableWeights, WeightsError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.transport.bus import Bus
from penstock.shared.weights import Staged, Way, device_memory, open_receiver

__all__ = ["PolicyFollower"]

logger = logging.getLogger(__name__)

RETRY_S = 0.5
ASK_AFTER, MAX_ASK_AFTER = 4, 120
"""Number of failed attempts to open a version before its trainer is asked to publish it again; it doubles with each
answered request, up to the second number."""
ASK_DEADLINE_S = 2.0
UNREADABLE_S = 0.5, 5.0
"""First and longest wait between attempts to read a version by transports that this worker cannot use (seconds)."""
UNREADABLE_ASK_S = 60.0, 600.0
"""First and longest time between requests to publish such a version again (seconds)."""


@dataclass(frozen=True, slots=True)
class _Referred:
    """A version that the engine's processes opened and hold: a ``Staged`` without memory in this process."""

    manifest: WeightManifest
    way: Way

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: the engine reads the tensors itself."""
        return {}

    def intact(self) -> bool:
        """Return True always: the process of the engine holds the memory of the weights, and does this check itself."""
        return True

    def release(self) -> None:
        """Do nothing: the engine releases the memory at the end of the update."""


class PolicyFollower:
    """Watches the weight manifest of the job, or that under ``key``, and loads each new policy version into the engine.

    Args:
        held: stores each version before the next one is served.
        leaving: called directly before the engine serves another version.
        updating: called with version and digest; returns the context for one attempt to load this announced version.
            The context yields True if the attempt first had to wait.
    """

    def __init__(
        self,
        bus: Bus,
        settings: ServiceSettings,
        job: str,
        engine: Updatable,
        *,
        key: str = "",
        held: WeightRing | None = None,
        leaving: Callable[[], Awaitable[None]] | None = None,
        updating: Callable[[int, str], AbstractAsyncContextManager[bool]] = lambda version, digest: nullcontext(False),
    ) -> None:
        self._bus, self._settings, self._job, self._engine = bus, settings, job, engine
        self._key, self._held, self._leaving, self._updating = key or job, held, leaving, updating
        self._by_reference = engine.caps.staging == "reference"
        self._receiver = open_receiver(settings, memory=None if self._by_reference else device_memory(settings))
        self._routes: WeightRoutes | None = None
        self._serving: Staged | None = None
        self._changed = asyncio.Condition()
        self.version = -1
        self.digest = ""
        self.epoch = -1
        self.pause_s = 0.0
        self.stage_s = 0.0
        self.way: Way | None = None
        """Transport and fetched bytes of the version that was staged last."""
        self._problem: tuple[float, str] | None = None
        """Start (Unix seconds) and reason of the current failure to load the newest version; None if there is none."""
        self._unstaged: WeightsError | None = None
        """Error of the last attempt to stage a version; None if it was staged."""

    async def run(self) -> None:
        """Follow manifests until cancelled. If a version cannot be staged, retry while the engine serves the old
        version."""
        try:
            async with contextlib.aclosing(self._bus.kv(subjects.MANIFESTS).watch(self._key)) as entries:
                async for entry in entries:
                    if entry.value is not None and entry.key == self._key:  # other keys also begin with the job's id
                        await self._follow(unpack(entry.value, WeightManifest)[0])
        finally:
            await self._engine.close()
            await asyncio.to_thread(self._unmap)

    def _unmap(self) -> None:
        """Release the version in use and close the receiver, which unmaps the memory of the weights. Runs in a thread,
        because it takes long to unmap much memory."""
        if self._serving is not None:
            self._serving.release()
            self._serving = None
        self._receiver.close()

    async def _follow(self, manifest: WeightManifest) -> None:
        """Load the version of a manifest, with retries. A newer manifest that arrives meanwhile replaces ``manifest``.

        If its weights stay lost, ask the trainer to publish it again. If this worker can use no transport of the
        version, that hardly helps, and costs a job that trains an adapter a restart: then ask much more rarely.
        """
        clock = asyncio.get_running_loop().time
        tries, ask_after, (wait_s, longest_s) = 0, ASK_AFTER, UNREADABLE_S
        since, (ask_s, longest_ask_s) = clock(), UNREADABLE_ASK_S
        while not self._outdated(manifest) and not await self._update(manifest):
            if isinstance(self._unstaged, UnreadableWeights):
                if clock() - since >= ask_s and await self._request_again(manifest):
                    since, ask_s = clock(), min(2 * ask_s, longest_ask_s)
                before, manifest = manifest, await self._changed_within(manifest, wait_s)
                wait_s = min(2 * wait_s, longest_s) if manifest == before else UNREADABLE_S[0]
                continue
            tries += self._unstaged is not None
            if tries >= ask_after:
                tries = 0
                ask_after = min(ask_after << await self._request_again(manifest), MAX_ASK_AFTER)
            before, manifest = manifest, await self._changed_within(manifest, RETRY_S)
            if (manifest.version, manifest.digest) != (before.version, before.digest):
                tries, ask_after = 0, ASK_AFTER
        self._problem = None  # there is nothing left to load

    async def _changed_within(self, manifest: WeightManifest, seconds: float) -> WeightManifest:
        """Wait until another manifest replaces ``manifest``, but at most ``seconds``; return the newest manifest."""
        clock = asyncio.get_running_loop().time
        end, newest = clock() + seconds, manifest
        while newest == manifest and (left_s := end - clock()) > 0:
            await asyncio.sleep(min(RETRY_S, left_s))
            newest = await self._newest(self._key) or manifest
        return newest

    async def _update(self, manifest: WeightManifest) -> bool:
        """Load the version of a manifest; see ``_adopt``. If the update first has to wait (for groups in progress),
        load the version that is the newest after the wait."""
        async with self._updating(manifest.version, manifest.digest) as waited:
            if waited:
                manifest = await self._newest(self._key) or manifest
            return await self._adopt(manifest)

    async def _request_again(self, manifest: WeightManifest) -> bool:
        """Ask the trainer to publish the version in ``manifest`` again, which could not be loaded. Waiting for a later
        version is not enough, because there may be none. Return True if the trainer replies."""
        with contextlib.suppress(Unavailable):  # a starting trainer publishes it anyway
            data = pack(manifest, job=self._job, id=str(manifest.version), epoch=manifest.epoch)
            await self._bus.request(subjects.lost_weights(self._job), data, deadline_s=ASK_DEADLINE_S)
            return True
        return False

    def _outdated(self, manifest: WeightManifest) -> bool:
        return manifest.epoch < self.epoch or (manifest.version, manifest.digest) == (self.version, self.digest)

    async def _newest(self, key: str) -> WeightManifest | None:
        try:
            entry = await self._bus.kv(subjects.MANIFESTS).get(key)
        except Unavailable:
            return None
        return unpack(entry.value, WeightManifest)[0] if entry is not None and entry.value is not None else None

    async def _adopt(self, manifest: WeightManifest) -> bool:
        """Load a version into the engine; return False if it could not be staged or committed."""
        clock = asyncio.get_running_loop().time
        try:
            start = clock()
            await self._ensure_base(manifest.base)
            await self._take_route()
            staged = await self._stage(manifest)
            self.stage_s, self.way, self._unstaged = clock() - start, staged.way, None
        except WeightsError as error:
            self._unstaged = error
            return self._refuse(f"version {manifest.version} not staged: {error}")
        try:
            if self._held is not None and self._serving is not None:
                await asyncio.to_thread(self._held.keep, self._serving)
            self.pause_s = await self._load(manifest, staged, base=False)
            before, self._serving = self._serving, staged
        except WeightsError as error:
            return self._refuse(f"version {manifest.version} not committed: {error}")
        finally:
            if self._serving is not staged:  # also when this worker is being stopped
                staged.release()
        if before is not None:
            before.release()
        self._problem = None
        async with self._changed:
            self.version, self.digest, self.epoch = manifest.version, manifest.digest, manifest.epoch
            self._changed.notify_all()
        return True

    def _refuse(self, text: str) -> bool:
        """Report that a version was not loaded; returns False."""
        logger.warning("%s", text)
        self._problem = bus_time() if self._problem is None else self._problem[0], text
        return False

    async def _take_route(self) -> None:
        """Read the transport that the coordinator chose for this worker; without a choice, all transports are tried in
        order."""
        with contextlib.suppress(Unavailable):
            entry = await self._bus.kv(subjects.MANIFESTS).get(subjects.weight_routes(self._job))
            if entry is not None and entry.value is not None:
                self._routes = unpack(entry.value, WeightRoutes)[0]
                if not self._by_reference:
                    self._receiver.follow(self._settings.worker_id, self._routes)

    def status(self) -> dict[str, Any]:
        """Return heartbeat entries: available transports, and the transfer of the newest version."""
        known = self._receiver.transports
        if self._by_reference:
            known = [transport for transport in known if transport in self._engine.caps.transports]
        row: dict[str, Any] = {"transports": known, "devices": self._receiver.devices, "pause_s": self.pause_s}
        if self._problem is not None:
            since, text = self._problem
            row |= {"problem": text, "problem_since": since}
        if self.way is None:
            return row
        return row | {
            "transport": self.way.transport, "stage_s": self.stage_s, "fetched_bytes": self.way.fetched_bytes,
        }  # fmt: skip

    async def _stage(self, manifest: WeightManifest) -> Staged:
        """Stage the weights of ``manifest``, in a thread; an engine that loads weights by reference stages them itself.

        If this worker is stopped meanwhile, the thread's result is released, because its lock would remain.
        """
        if self._by_reference:
            engine = cast(UpdatableByReference, self._engine)
            return _Referred(manifest, await engine.stage(manifest, self._routes))
        staging = asyncio.create_task(asyncio.to_thread(self._receiver.stage, manifest))
        try:
            return await asyncio.shield(staging)
        except asyncio.CancelledError:
            staging.add_done_callback(self._release_unwanted)
            raise

    def _release_unwanted(self, staging: asyncio.Task[Staged]) -> None:
        if not staging.cancelled() and staging.exception() is None:
            staging.result().release()
        self._receiver.close()

    async def _load(self, manifest: WeightManifest, staged: Staged, *, base: bool) -> float:
        """Begin, load and commit an update; return the seconds for which decoding was stopped.

        On failure or cancellation, abort the update and release the staged weights.
        """
        committed = False
        try:
            await self._engine.begin_update(
                version=manifest.version,
                digest=manifest.digest,
                mode="in_place" if base or self._by_reference else "swap",
                guard=None if base or self._by_reference else staged.intact,
                base=base,
            )
            if not self._by_reference:
                await self._engine.load_chunk(staged.tensors())
            if self._leaving is not None and not base:
                await self._leaving()  # as late as possible: a version that cannot be loaded costs nothing
            pause_s = await self._engine.commit_update()
            committed = True
            await self._check_echo(manifest, base=base)
        finally:
            if not committed:
                await self._engine.abort_update()
                staged.release()
        return pause_s

    async def _check_echo(self, manifest: WeightManifest, *, base: bool) -> None:
        """Check that the engine reports the new version.

        Raises:
            WeightsError: it reports another version.
        """
        info = await self._engine.weight_info()
        served = ("base", info.base) if base else (info.version, info.digest)
        if served != (("base", manifest.digest) if base else (manifest.version, manifest.digest)):
            raise WeightsError(f"the engine says that it serves {served} after the update to {manifest.version}")

    async def _ensure_base(self, digest: str) -> None:
        """Ensure that the engine has the base weights of the next adapter.

        Raises:
            UnreadableWeights: the engine loaded other base weights, and the trainer publishes none.
            WeightsError: the base weights that the trainer publishes cannot be loaded.
        """
        own = (await self._engine.weight_info()).base
        if own == digest:
            return
        manifest = await self._newest(subjects.base_manifest(self._job))
        if manifest is None or manifest.digest != digest:
            raise UnreadableWeights(
                f"its adapter belongs to base '{digest}', this engine has '{own}' and the trainer publishes none: "
                "model.path must be the same model on every host"
            )
        staged = await self._stage(manifest)
        await self._load(manifest, staged, base=True)
        staged.release()

    async def first(self) -> None:
        """Wait for the first version. The wait has no time limit, but ends at the latest with the job."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= 0)

    async def reach(self, wanted: Callable[[int], bool], *, deadline_s: float, what: str) -> None:
        """Wait until ``wanted(version)`` is true. Raises a DeadlineError that names ``what``."""
        if wanted(self.version):
            return
        try:
            async with asyncio.timeout(max(0.0, deadline_s)), self._changed:
                await self._changed.wait_for(lambda: wanted(self.version))
        except TimeoutError:
            raise DeadlineError(f"waited {deadline_s:.1f} s for {what}; the engine serves {self.version}") from None
