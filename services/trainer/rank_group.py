"""Ranks of one job: rank 0 calls an operation, and every rank runs it on its replica."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.services.trainer.backends.base import LearnerState
from penstock.services.trainer.batch.inputs import BatchInputs
from penstock.services.trainer.learners.job_learner import JobLearner
from penstock.services.trainer.ranks.heartbeats import Ranks, to_the_end
from penstock.services.trainer.ranks.orders import (
    Close,
    DiscardSnapshot,
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
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.messages import BatchManifest

__all__ = ["RankGroup"]

T = TypeVar("T")


class RankGroup:
    """Runs each operation on rank 0's replica and on all other ranks.

    Args:
        ranks: connection to the other ranks; None: this rank is alone, and its calls can be cancelled because no other
            rank waits for them.
    """

    def __init__(self, replica: Replica, ranks: Ranks | None) -> None:
        self._replica, self._ranks = replica, ranks
        self.seconds = {"fetch": 0.0, "update": 0.0}

    async def open(self, simulator: EnvSpec | None = None) -> None:
        """Build the model with its initial weights; see ``open_learner``. Raises ConfigError."""
        replica = self._replica
        order = Open(replica.job, replica.config.model_dump_json(), simulator)
        await self._order(order, partial(replica.open, simulator))

    async def warm_start(self, on_step: Callable[[int, float], None]) -> None:
        """Train on reference answers or demonstrations. Raises DataError or ConfigError."""
        await self._order(WarmStart(), partial(self._replica.warm_start, on_step))

    async def load(self, path: Path) -> None:
        """Load a checkpoint. Raises CheckpointError."""
        await self._order(Load(str(path)), partial(self._replica.load, path))

    def inputs(self, last_trained: int) -> BatchInputs:
        """Return a prefetcher of the batches after ``last_trained``; see ``Replica.inputs``."""
        return self._replica.inputs(last_trained)

    async def train(self, manifest: BatchManifest, inputs: BatchInputs | None = None) -> dict[str, float]:
        """Fetch the groups of a batch, make the update and return its metrics.

        Raises:
            Untrainable: some groups cannot be trained; nothing was changed.
            ProtocolError: the batch as a whole cannot be trained.
            NonFiniteStep: a loss or gradient is not finite and `train.on_nonfinite` is `pause`.
        """

        async def work() -> dict[str, float]:
            began = time.perf_counter()
            shard = await self._replica.fetch(manifest, inputs)
            fetched = time.perf_counter()
            metrics = await self._replica.update(shard, update_index=manifest.update_index)
            self.seconds["fetch"] += fetched - began
            self.seconds["update"] += time.perf_counter() - fetched
            return metrics

        return await self._order(Train(manifest), work)

    async def snapshot(self) -> None:
        """Copy the training state in memory, for ``restore``."""
        await self._order(Snapshot(), self._replica.snapshot)

    async def restore(self) -> None:
        """Restore the training state from the copy that ``snapshot`` made, and free the copy."""
        await self._order(Restore(), self._replica.restore)

    async def discard_snapshot(self) -> None:
        """Free the copy that ``snapshot`` made, if there is one."""

        async def work() -> None:
            self._replica.discard_snapshot()

        await self._order(DiscardSnapshot(), work)

    async def publish(self, use: Callable[[JobLearner], T]) -> T:
        """Run ``use(learner)`` in rank 0's compute thread and return its result.

        ``use`` must read all weights once, because all ranks gather them.
        """
        return await self._order(Publish(), partial(self._replica.write, use))

    async def remove_leftovers(self) -> None:
        """Delete unfinished files of earlier checkpoint writers of this job. Raises OSError."""
        await self._replica.remove_leftovers()

    async def save(self, number: int, meta: dict[str, object]) -> asyncio.Task[Path]:
        """Copy the state of every rank and start to write it.

        Returns:
            Task that writes while the next batches train. It returns the directory of the checkpoint or raises
            CheckpointError. Do not cancel it: the other ranks write at the same time.
        """
        token = secrets.token_hex(4)

        async def write(state: LearnerState) -> Path:
            path = await self._replica.save(state, number, token, meta)
            assert path is not None, "rank 0 commits"
            return path

        async def work() -> asyncio.Task[Path]:
            return asyncio.create_task(write(await self._replica.copy()), name="checkpoint")

        return await self._order(Save(number, token), work)

    async def close(self) -> None:
        """Free the models of the job on every rank."""

        async def work() -> None:
            self._replica.close()

        await self._order(Close(), work)

    async def _order(self, order: Order, work: Callable[[], Awaitable[T]]) -> T:
        if self._ranks is None:
            return await work()
        return await to_the_end(self._carry_out(self._ranks, order, work))

    async def _carry_out(self, ranks: Ranks, order: Order, work: Callable[[], Awaitable[T]]) -> T:
        async with ranks.busy:
            if ranks.place.size > 1:
                await ranks.unless_failed(ranks.threads.compute(partial(ranks.orders.give, order)))
            return await ranks.unless_failed(_coroutine(work))


async def _coroutine(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
