"""Follower: a trainer rank above 0, which carries out the orders of rank 0 and votes with the other ranks."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.trainer.batch.inputs import BatchInputs, Untrainable
from penstock.services.trainer.ranks.heartbeats import Ranks
from penstock.services.trainer.ranks.orders import (
    Close,
    DiscardSnapshot,
    Leave,
    Load,
    Open,
    Order,
    Publish,
    Restore,
    Save,
    Snapshot,
    Train,
    WarmStart,
)
from penstock.services.trainer.replica import Replica
from penstock.services.trainer.update_rules.on_policy import NonFiniteStep
from penstock.shared.config.jobs.kinds import AnyTraining, parse_training
from penstock.shared.errors import CheckpointError, ConfigError, DataError, ProtocolError
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.runtime.tasks import Background
from penstock.shared.transport.bus import Bus

__all__ = ["Follower"]

logger = logging.getLogger(__name__)


class Follower:
    """Carries out the orders of rank 0, until dismissed. Only rank 0 reports the errors that all ranks share."""

    def __init__(self, bus: Bus, ranks: Ranks, checkpoints: Path) -> None:
        self._bus, self._ranks, self._root = bus, ranks, checkpoints
        self._replica: Replica | None = None
        self._inputs: BatchInputs | None = None
        self._following: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._doing, self._since = "", bus_time()

    async def run(self) -> None:
        """Carry out orders until rank 0 sends ``Leave``.

        Raises:
            RankLost: a rank is lost; this process must end too.
        """
        try:
            async with Background() as background:
                while (order := await self._next()) is not None:
                    await self._obey(order, background)
                if self._saving is not None:
                    await asyncio.gather(self._saving, return_exceptions=True)
        finally:
            self._ranks.orders.stop()  # a thread may still wait for the next order

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the heartbeat entry of the job that this rank trains; empty without a job."""
        replica, place = self._replica, self._ranks.place
        if replica is None:
            return {}
        row: dict[str, Any] = {"rank": place.rank, "ranks": place.size, "running": int(bool(self._doing))}
        if not self._doing:
            row |= {"waiting_for": "the next order of rank 0", "since": self._since}
        return {replica.job: row}

    async def _next(self) -> Order | None:
        self._doing, self._since = "", bus_time()
        order = await asyncio.to_thread(self._ranks.orders.take)
        return None if isinstance(order, Leave) else order

    async def _obey(self, order: Order, background: Background) -> None:
        self._doing, self._since = type(order).__name__.lower(), bus_time()
        try:
            await self._carry_out(order, background)
        except (ConfigError, DataError, CheckpointError, Untrainable, ProtocolError, NonFiniteStep) as error:
            logger.warning("%s: %s", self._doing, error)

    async def _carry_out(self, order: Order, background: Background) -> None:
        match order:
            case Open(job=job, spec=spec, simulator=simulator):
                await self._open(job, parse_training(msgspec.json.decode(spec)), simulator)
            case Close():
                self._close()
            case Train():
                await self._train(order, background)
            case Save(number=number, token=token):
                await self._save(number, token, background)
            case WarmStart():
                await self._held.warm_start(lambda step, loss: None)
            case Load(path=path):
                await self._held.load(Path(path))
            case Publish():
                await self._held.gather_weights()
            case Snapshot() | Restore() | DiscardSnapshot():
                await self._keep_copy(order)

    async def _keep_copy(self, order: Snapshot | Restore | DiscardSnapshot) -> None:
        match order:
            case Snapshot():
                await self._held.snapshot()
            case Restore():
                await self._held.restore()
            case DiscardSnapshot():
                self._held.discard_snapshot()

    async def _open(self, job: str, config: AnyTraining, simulator: EnvSpec | None) -> None:
        self._close()
        ranks = self._ranks
        self._replica = Replica(
            self._bus, job, config, world=ranks.world, threads=ranks.threads, checkpoints=self._root
        )
        await self._held.open(simulator)

    def _close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        if self._replica is not None:
            self._replica.close()
        self._replica = self._inputs = self._following = None

    async def _train(self, order: Train, background: Background) -> None:
        manifest = order.manifest
        if self._inputs is None:
            self._inputs = self._held.inputs(manifest.number - 1)
            self._following = background.spawn(self._inputs.run(), name="inputs")
        shard = await self._held.fetch(manifest, self._inputs)
        await self._held.update(shard, update_index=manifest.update_index)
        self._inputs.trained(manifest)

    async def _save(self, number: int, token: str, background: Background) -> None:
        state = await self._held.copy()
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)
        self._saving = background.spawn(self._write(self._held, state, number, token), name="checkpoint")

    async def _write(self, replica: Replica, state: Any, number: int, token: str) -> None:
        try:
            await replica.save(state, number, token, None)
        except CheckpointError as error:
            logger.warning("checkpoint %d: %s", number, error)

    @property
    def _held(self) -> Replica:
        assert self._replica is not None, "rank 0 opens a job before it trains it"
        return self._replica
