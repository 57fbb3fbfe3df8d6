"""Sealed batches and their groups, as the trainer reads them from the bus."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import xxhash

from penstock.shared.errors import NotFound, ProtocolError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import BatchManifest
from penstock.shared.protocol.trajectory import Group, decode_group
from penstock.shared.transport.bus import Bus

__all__ = ["BatchInputs", "Untrainable", "fetch_groups", "read_manifests"]

logger = logging.getLogger(__name__)


class Untrainable(Exception):  # noqa: N818
    """A sealed batch whose groups cannot be trained; names the bad draws."""

    def __init__(self, bad: list[Draw], reason: str) -> None:
        super().__init__(reason)
        self.bad, self.reason = bad, reason


async def fetch_groups(bus: Bus, manifest: BatchManifest, *, max_lag: int) -> list[Group]:
    """The groups of a batch in order, each checked against its digest and the lag bound.

    Raises:
        Untrainable: groups are gone, differ from what was sealed, or are too old.
    """
    messages = await bus.get_many(subjects.EXPERIENCE, [group.seq for group in manifest.groups])
    groups, bad, reasons = [], [], []
    for sealed in manifest.groups:
        try:
            message = messages.get(sealed.seq)
            if message is None:
                raise NotFound("it is not in the stream any more")
            if xxhash.xxh3_128_hexdigest(message.data) != sealed.digest:
                raise ProtocolError("its bytes do not hash to the sealed digest")
            group = decode_group(message.data)
            oldest = int(group.spans[:, 1].min()) if len(group.spans) else 0
            if group.draw != sealed.draw or manifest.start_version - oldest > max_lag:
                raise ProtocolError(f"it is draw {group.draw} from version {oldest}")
        except (NotFound, ProtocolError) as error:
            bad.append(sealed.draw)
            reasons.append(f"draw {sealed.draw}: {error}")
        else:
            groups.append(group)
    if bad:
        raise Untrainable(bad, "; ".join(reasons[:3]))
    return groups


async def read_manifests(bus: Bus, job: str) -> dict[tuple[int, int], BatchManifest]:
    """Every manifest published so far, by (number, revision)."""
    found = {}
    for message in await bus.read(subjects.BATCHES, subjects.batches(job)):
        manifest, _ = unpack(message.data, BatchManifest)
        found[manifest.number, manifest.revision] = manifest
    return found


class BatchInputs:
    """Follows the sealed batches of a job and fetches their groups ahead of their turn."""

    def __init__(self, bus: Bus, job: str, *, max_lag: int, last_trained: int) -> None:
        self._bus, self._job, self._max_lag, self._last = bus, job, max_lag, last_trained
        self._newest: dict[int, BatchManifest] = {}
        self._fetching: dict[tuple[int, int], asyncio.Task[list[Group]]] = {}
        self._refused: dict[int, int] = {}
        self._epoch = 0
        self.arrived = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        reader = self._bus.follow(subjects.BATCHES, subjects.batches(self._job))
        async with contextlib.aclosing(reader):
            async for message in reader:
                manifest, envelope = unpack(message.data, BatchManifest)
                if envelope.epoch < self._epoch:
                    logger.warning("batch %d of a fenced coordinator ignored", manifest.number)
                    continue
                self._epoch = envelope.epoch
                self._take(manifest)

    def _take(self, manifest: BatchManifest) -> None:
        known = self._newest.get(manifest.number)
        if manifest.number <= self._last or manifest.revision <= self._refused.get(manifest.number, 0):
            return
        if known is not None and known.revision >= manifest.revision:
            return
        self._newest[manifest.number] = manifest
        key = manifest.number, manifest.revision
        self._fetching[key] = asyncio.create_task(fetch_groups(self._bus, manifest, max_lag=self._max_lag))
        self._fetching[key].add_done_callback(_retrieve)
        self.arrived.set()

    def peek(self, number: int) -> BatchManifest | None:
        """The newest revision of batch ``number``, if it is sealed."""
        return self._newest.get(number)

    async def groups(self, manifest: BatchManifest) -> list[Group]:
        """The groups of a batch. Raises Untrainable."""
        return await self._fetching.pop((manifest.number, manifest.revision))

    def refused(self, manifest: BatchManifest) -> None:
        """Wait for a higher revision of this batch."""
        self._refused[manifest.number] = manifest.revision
        self._newest.pop(manifest.number, None)

    def trained(self, manifest: BatchManifest) -> None:
        """This batch is done."""
        self._last = manifest.number
        self._newest.pop(manifest.number, None)


def _retrieve(task: asyncio.Task[list[Group]]) -> None:
    """Mark the error as seen: whoever asks for the groups gets it."""
    if not task.cancelled():
        task.exception()
