"""Receives the coordinator's scaling requests over the bus."""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.shared.errors import Conflict
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.scaling import ScaleReply, ScaleRequest
from penstock.shared.transport.bus import Bus

__all__ = ["Scalable", "Supervisor"]

CONNECT_S = 60.0


class Scalable(Protocol):
    """Workers whose number can change."""

    async def scale(self, service: str, replicas: int) -> None:
        """Set the number of workers of a service, without waiting until new ones are ready or old ones have ended."""
        ...

    async def pool(self, service: str) -> ScaleReply:
        """Return how many workers a service has, how many of them are ready, and how many others still drain."""
        ...


class Supervisor:
    """Serves scaling requests for the workers of one machine. Without a supervisor, users start workers by hand."""

    def __init__(self, nats_url: str, processes: Scalable) -> None:
        self._nats_url, self._processes = nats_url, processes
        self._newest: dict[str, str] = {}
        """By pool of workers: id of the operation of the newest accepted request."""

    async def run(self) -> None:
        """Serve until cancelled."""
        bus = await Bus.connect(self._nats_url, name="supervisor", deadline_s=CONNECT_S)
        async with bus, await bus.serve(subjects.SCALE, self._answer):
            await asyncio.Event().wait()

    async def _answer(self, data: bytes) -> bytes:
        request, _ = unpack(data, ScaleRequest)
        if request.replicas is not None:
            if request.operation < self._newest.get(request.pool, ""):  # from a stalled leader
                raise Conflict(f"a newer request for workers of '{request.pool}' was taken already")
            self._newest[request.pool] = request.operation
            await self._processes.scale(request.pool, request.replicas)
        return pack(await self._processes.pool(request.pool))
