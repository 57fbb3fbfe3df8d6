"""Executes requests for more or fewer workers through the supervisor of the worker processes. Run by the leader."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from penstock.services.coordinator.jobs.store import JobStore
from penstock.shared.errors import Conflict, PenstockError, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_datetime
from penstock.shared.protocol.codec import pack, unpack
from penstock.shared.protocol.jobs import Operation
from penstock.shared.protocol.scaling import Pool, ScaleReply, ScaleRequest
from penstock.shared.runtime.tasks import end_tasks, unexpected
from penstock.shared.transport.bus import Bus

__all__ = ["Scaler"]

logger = logging.getLogger(__name__)

ASK_S = 10.0
POLL_S = 0.5
DEADLINE_S = 180.0
"""Time in which new workers load models and old ones finish their work (seconds)."""
PROBE_S = 2.0


class Scaler:
    """Scales the workers of the deployment: ``run`` executes pending operations. Of several operations for one pool of
    workers, only the newest counts."""

    def __init__(self, bus: Bus, store: JobStore) -> None:
        self._bus, self._store = bus, store
        self._under_way: dict[str, tuple[str, Operation, asyncio.Task[None]]] = {}

    async def pool(self, pool: Pool) -> ScaleReply:
        """Return the current workers of a pool. Raises Unavailable if no supervisor starts processes on request."""
        return await self._ask(pool, None, PROBE_S)

    async def run(self) -> None:
        """Execute operations until cancelled."""
        try:
            async for job in self._store.watch():
                for operation in job.record().operations if job.scales else ():
                    if operation.kind == "scale" and operation.state == "pending":
                        await self._begin(job.id, operation)
        finally:
            await end_tasks([task for _, _, task in self._under_way.values()])
            self._under_way.clear()

    async def _begin(self, job: str, operation: Operation) -> None:
        """Start an operation. If an older operation for the same pool is running, stop it and mark it as failed. If a
        newer one is running, mark ``operation`` as failed instead."""
        pool = str(operation.args["pool"])
        before = self._under_way.get(pool)
        if before is not None:
            other_job, other, task = before
            if other.id == operation.id:
                return
            if other.id > operation.id and not task.done():
                await self._superseded(job, operation)
                return
            await end_tasks([task])
            await self._superseded(other_job, other)
        self._under_way[pool] = (job, operation, asyncio.create_task(self._carry_out(job, operation)))

    async def _superseded(self, job: str, operation: Operation) -> None:
        await self._finish(job, operation, state="failed", message="a newer request for the same workers replaced it")

    async def _carry_out(self, job: str, operation: Operation) -> None:
        pool, replicas = operation.args["pool"], int(operation.args["replicas"])
        deadline, problem = time.monotonic() + DEADLINE_S, ""
        while time.monotonic() < deadline:
            try:
                reply = await self._ask(pool, replicas, ASK_S, operation=operation.id)
            except Conflict:
                await self._superseded(job, operation)
                return
            except PenstockError as error:
                problem = str(error)
            else:
                if reply.replicas == reply.ready == replicas and not reply.leaving:
                    result = msgspec.to_builtins(reply)
                    await self._finish(job, operation, state="succeeded", result=result)
                    return
                problem = f"{reply.ready} of {replicas} are ready, {reply.leaving} still drain"
            await asyncio.sleep(POLL_S)
        await self._finish(job, operation, state="failed", message=f"not within {DEADLINE_S:g} s: {problem}")

    async def _ask(self, pool: Pool, replicas: int | None, deadline_s: float, *, operation: str = "") -> ScaleReply:
        request = ScaleRequest(pool=pool, replicas=replicas, operation=operation)
        data = await self._bus.request(subjects.SCALE, pack(request), deadline_s=deadline_s)
        return unpack(data, ScaleReply)[0]

    async def _finish(self, job: str, operation: Operation, **over: Any) -> None:
        done = operation.model_copy(update={**over, "finished_at": bus_datetime()})
        while (error := await unexpected(self._store.finish_operation(job, done))) is not None:
            logger.warning("how operation %s of job %s ended is not written yet: %s", operation.id, job, error)
            if not isinstance(error, Unavailable):
                return
            await asyncio.sleep(POLL_S)
