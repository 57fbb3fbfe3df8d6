"""Sealed batches and their groups, as a trainer rank reads them from the bus."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import xxhash

from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.errors import DeadlineError, NotFound, ProtocolError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup, decode_episode_group
from penstock.shared.protocol.events import SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import BatchManifest
from penstock.shared.protocol.trajectory import Group, decode_group
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.message import Message

__all__ = [
    "BatchInputs",
    "Decode",
    "Pick",
    "Untrainable",
    "completions",
    "decoder_of",
    "episodes",
    "fetch_shard",
    "read_manifests",
]

logger = logging.getLogger(__name__)

Pick = Callable[[BatchManifest], Sequence[int]]
"""Function that returns the positions of the groups that this rank trains, ascending."""
Decode = Callable[[bytes, SealedGroup], Group | EpisodeGroup]
"""Function that parses a stored group from its bytes and its manifest entry.

Raises ProtocolError if the group cannot be trained.
"""


class Untrainable(Exception):  # noqa: N818
    """Raised for a sealed batch with groups that cannot be trained. ``bad`` lists the draws of these groups; a draw
    identifies one attempt to get a group for a prompt."""

    def __init__(self, bad: list[Draw], reason: str) -> None:
        super().__init__(reason)
        self.bad, self.reason = bad, reason


def decoder_of(config: AnyTraining) -> Decode:
    """Return the function that parses a stored group of the job: episodes of an embodied job, else completions."""
    return (
        episodes if isinstance(config, EmbodiedJob) else partial(completions, temperature=config.sampling.temperature)
    )


def episodes(data: bytes, sealed: SealedGroup) -> EpisodeGroup:
    """Return the group of episodes in ``data``. Raises ProtocolError if the bytes are invalid."""
    return decode_episode_group(data)


def completions(data: bytes, sealed: SealedGroup, *, temperature: float) -> Group:
    """Return the group of completions in ``data``.

    Args:
        temperature: the job's sampling temperature, for groups that an earlier release sealed without a temperature.

    Raises:
        ProtocolError: the bytes are invalid, or the prompt is empty.
    """
    group = decode_group(data, temperature=temperature if sealed.temperature is None else sealed.temperature)
    if not len(group.prompt_ids):
        raise ProtocolError("its prompt is empty, so its first token cannot be scored")
    return group


async def fetch_shard(
    bus: Bus, manifest: BatchManifest, positions: Sequence[int], *, max_lag: int, decode: Decode
) -> BatchShard[Any]:
    """Fetch the groups at ``positions`` and check each against its digest and the lag bound.

    Raises:
        Untrainable: groups are missing, differ from the sealed ones, are too old or cannot be scored.
    """
    sealed = [manifest.groups[position] for position in positions]
    messages = await bus.get_whole(subjects.EXPERIENCE, [group.seq for group in sealed]) if sealed else {}
    groups: list[Any] = []
    bad, reasons = [], []
    for one in sealed:
        try:
            groups.append(_checked(messages.get(one.seq), one, manifest, max_lag, decode))
        except (NotFound, ProtocolError) as error:
            bad.append(one.draw)
            reasons.append(f"draw {one.draw}: {error}")
    if bad:
        raise Untrainable(bad, "; ".join(reasons[:3]))
    return BatchShard(
        groups, list(positions), len(manifest.groups), manifest.hyperparameters,
        objectives=tuple(one.objective for one in manifest.groups),
        baselines=tuple(one.baseline for one in manifest.groups),
        weights=tuple(one.weight for one in manifest.groups),
        start_version=manifest.start_version,
    )  # fmt: skip


def _checked(
    message: Message | None, sealed: SealedGroup, manifest: BatchManifest, max_lag: int, decode: Decode
) -> Group | EpisodeGroup:
    if message is None:
        raise NotFound("it is not in the stream any more")
    if xxhash.xxh3_128_hexdigest(message.data) != sealed.digest:
        raise ProtocolError("its bytes do not hash to the sealed digest")
    group = decode(message.data, sealed)
    oldest = int(group.spans[:, 1].min()) if len(group.spans) else 0
    stale = group.objective == "policy" and manifest.start_version - oldest > max_lag
    if group.draw != sealed.draw or group.objective != sealed.objective or stale:
        raise ProtocolError(f"it is draw {group.draw} ({group.objective}) from version {oldest}")
    return group


async def read_manifests(bus: Bus, job: str) -> dict[tuple[int, int], BatchManifest]:
    """Return every manifest published so far, by (number, revision)."""
    found = {}
    for message in await bus.read(subjects.BATCHES, subjects.batches(job)):
        manifest, _ = unpack(message.data, BatchManifest)
        found[manifest.number, manifest.revision] = manifest
    return found


class BatchInputs:
    """Follows the sealed batches of a job and prefetches this rank's groups."""

    def __init__(self, bus: Bus, job: str, pick: Pick, *, max_lag: int, decode: Decode, last_trained: int) -> None:
        self._bus, self._job, self._pick, self._last = bus, job, pick, last_trained
        self._max_lag, self._decode = max_lag, decode
        self._newest: dict[int, BatchManifest] = {}
        self._fetching: dict[tuple[int, int], asyncio.Task[BatchShard[Any]]] = {}
        self._refused: dict[int, int] = {}
        self.epoch = 0
        """Highest epoch of a coordinator that announced a batch."""
        self.arrived = asyncio.Event()

    async def run(self) -> None:
        """Read announcements of batches until cancelled, and prefetch this rank's groups of each new batch."""
        reader = self._bus.follow(subjects.BATCHES, subjects.batches(self._job))
        async with contextlib.aclosing(reader):
            async for message in reader:
                manifest, envelope = unpack(message.data, BatchManifest)
                if envelope.epoch < self.epoch:
                    logger.warning("batch %d of a fenced coordinator ignored", manifest.number)
                    continue
                self.epoch = envelope.epoch
                self._take(manifest)

    def peek(self, number: int) -> BatchManifest | None:
        """Return the newest revision of batch ``number``; None before it is sealed."""
        return self._newest.get(number)

    async def shard(self, manifest: BatchManifest) -> BatchShard[Any]:
        """Return this rank's groups of a batch. Raises Untrainable."""
        key = manifest.number, manifest.revision
        if key in self._fetching:
            try:
                return await self._fetching.pop(key)
            except (Unavailable, DeadlineError) as error:  # the prefetch may have failed long ago
                logger.warning("batch %d is fetched again: %s", manifest.number, error)
        self._fetch(manifest)  # also if rank 0's order arrived before the announcement, or the batch is tried again
        return await self._fetching.pop(key)

    def refused(self, manifest: BatchManifest) -> None:
        """Record that this batch was refused: ignore the batch until a higher revision is announced."""
        self._refused[manifest.number] = manifest.revision
        self._newest.pop(manifest.number, None)

    def trained(self, manifest: BatchManifest) -> None:
        """Record that this batch is trained: drop the manifests and groups of this batch and all earlier ones."""
        self._last = manifest.number
        for number in [number for number in self._newest if number <= self._last]:
            del self._newest[number]
        for key in [key for key in self._fetching if key[0] <= self._last]:
            self._fetching.pop(key).cancel()

    def _take(self, manifest: BatchManifest) -> None:
        known = self._newest.get(manifest.number)
        if manifest.number <= self._last or manifest.revision <= self._refused.get(manifest.number, 0):
            return
        if known is not None and known.revision >= manifest.revision:
            return
        self._newest[manifest.number] = manifest
        self._fetch(manifest)
        self.arrived.set()

    def _fetch(self, manifest: BatchManifest) -> None:
        fetching = fetch_shard(self._bus, manifest, self._pick(manifest), max_lag=self._max_lag, decode=self._decode)
        task = self._fetching[manifest.number, manifest.revision] = asyncio.create_task(fetching)
        task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[BatchShard[Any]]) -> None:
    """Retrieve the error of a failed prefetch, so that asyncio does not log it. ``shard`` still gets the error."""
    if not task.cancelled():
        task.exception()
