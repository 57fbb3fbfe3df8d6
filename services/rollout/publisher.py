"""Publisher of finished groups: groups ready at the same time are written in one durable publish."""

from __future__ import annotations

import asyncio
import logging

from penstock.shared.errors import Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup, encode_episode_group
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers
from penstock.shared.transport.bus import Bus, Outgoing

__all__ = ["GroupPublisher"]

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 64
BYTES_AT_ONCE = 8 << 20
SLOWEST_BYTES_PER_S = 4 << 20
"""Lowest assumed upload rate (bytes per second), from which the deadline of large groups follows."""
RETRY_S = 0.2


class GroupPublisher:
    """Publishes groups in batches; retries while the stream is full or the bus is unavailable (see ``blocked``)."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus, self._job = bus, job
        self._queue: asyncio.Queue[tuple[Outgoing, asyncio.Future[None]]] = asyncio.Queue(maxsize=1024)
        self.blocked: tuple[float, str] | None = None
        """Start (Unix seconds) and reason of the current failure to publish; None if there is none."""

    async def publish(self, group: Group | EpisodeGroup, *, raw: bool = False) -> None:
        """Queue a group and return once it is durable. ``raw``: publish it as unscored, for a reward worker."""
        data, header = encode_group(group) if isinstance(group, Group) else encode_episode_group(group)
        subject = subjects.raw(self._job) if raw else subjects.experience(self._job)
        outgoing = Outgoing(subject, data, group_headers(header), f"{self._job}:{group.draw}:{group.attempt}:{raw}")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put((outgoing, done))
        await done

    async def run(self) -> None:
        """Publish queued groups until cancelled."""
        while True:
            batch = [await self._queue.get()]
            nbytes = len(batch[0][0].data)
            while not self._queue.empty() and len(batch) < MAX_AT_ONCE and nbytes < BYTES_AT_ONCE:
                batch.append(self._queue.get_nowait())
                nbytes += len(batch[-1][0].data)
            await self._send([outgoing for outgoing, _ in batch])
            for _, done in batch:
                if not done.done():
                    done.set_result(None)

    async def _send(self, messages: list[Outgoing]) -> None:
        deadline_s = 5 + sum(len(message.data) for message in messages) / SLOWEST_BYTES_PER_S
        while True:
            try:
                await self._bus.publish_whole(messages, deadline_s=deadline_s)
            except Unavailable as error:
                self.blocked = (self.blocked[0] if self.blocked else bus_time(), str(error))
                logger.warning("groups of %s wait: %s", self._job, error)
                await asyncio.sleep(RETRY_S)
            else:
                self.blocked = None
                return
