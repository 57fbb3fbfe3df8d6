"""Chooses the transport by which each worker of a job gets its weights, from what trainer and workers support.

The choice is stored in the bucket of manifests. Trainer and workers read it before each version; a worker whose
transport fails tries the others, and its heartbeat names the one that delivered its weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence

from penstock.services.coordinator.jobs.members import Member, Members
from penstock.shared.errors import Conflict, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.weights import COLLECTIVES, WeightRoutes
from penstock.shared.transport.bus import Bus

__all__ = ["WeightRouter", "chosen_transports", "transports_of"]

logger = logging.getLogger(__name__)
POLL_S = 0.5
DEADLINE_S = 5.0


def chosen_transports(job: str, trainer: Member | None, workers: Sequence[Member]) -> dict[str, str]:
    """Return the transport of each worker that follows the policy of ``job``.

    On the trainer's host: CUDA IPC if the worker's GPU can read the trainer's, else shared memory. On another host: a
    broadcast if the worker is the only one there, else TCP, where the workers of a host share one transfer, else files
    in a directory that both ends are set to. A worker that supports none of what the trainer does gets no entry.
    """
    if trainer is None:
        return {}
    sends, devices = set(_transports(trainer, job)), _listed(trainer, job, "devices")
    rows = [(worker, worker.beat, set(_transports(worker, job))) for worker in workers]
    per_host = Counter(beat.host for _, beat, receives in rows if receives)
    chosen = {}
    for worker, beat, receives in rows:
        both, near = sends & receives, beat.host == trainer.beat.host
        broadcast = [kind for kind in COLLECTIVES if kind in both and per_host[beat.host] == 1]
        if near and "cuda_ipc" in both and set(devices) & set(_listed(worker, job, "devices")):
            chosen[beat.worker] = "cuda_ipc"
        elif near and "shm" in both:
            chosen[beat.worker] = "shm"
        elif broadcast:
            chosen[beat.worker] = broadcast[-1]
        elif way := next((name for name in ("tcp", "disk") if name in both), ""):
            chosen[beat.worker] = way
    return chosen


def transports_of(job: str, members: Members, clock: float) -> dict[str, str]:
    """Return the transport of each live rollout worker of ``job``; see ``chosen_transports``."""
    trainers = [one for one in members.of("trainer", clock) if _transports(one, job)]
    return chosen_transports(job, next(iter(trainers), None), members.of("rollout", clock))


def _transports(member: Member, job: str) -> list[str]:
    """Return the transports that a process supports; [] if the process runs a release that does not report them."""
    return _listed(member, job, "transports")


def _listed(member: Member, job: str, key: str) -> list[str]:
    return [str(name) for name in member.beat.jobs.get(job, {}).get(key, [])]


class WeightRouter:
    """Chooses the transports for one job repeatedly, and stores each changed choice."""

    def __init__(self, bus: Bus, job: str, members: Members) -> None:
        self._bus, self._job, self._members = bus, job, members

    async def follow(self) -> None:
        """Update the stored choice of transports until cancelled."""
        while True:
            try:
                await self._choose()
            except (Conflict, Unavailable) as error:  # another leader wrote, or the bus is away: retry
                logger.debug("%s: transports of weights are not written yet: %s", self._job, error)
            await asyncio.sleep(POLL_S)

    async def _choose(self) -> None:
        transports = transports_of(self._job, self._members, time.monotonic())
        if not transports:  # a restarted trainer finds the same workers
            return
        kv, key = self._bus.kv(subjects.MANIFESTS), subjects.weight_routes(self._job)
        entry = await kv.get(key)
        known = None if entry is None or entry.value is None else unpack(entry.value, WeightRoutes)[0]
        if known is not None and known.transports == transports:
            return
        routes = WeightRoutes(epoch=known.epoch + 1 if known is not None else 1, transports=transports)
        data = pack(routes, job=self._job, id=key, epoch=routes.epoch)
        await kv.update(key, data, 0 if entry is None else entry.revision, deadline_s=DEADLINE_S)
