"""State of a process that is one of several trainer ranks: its connections to the other ranks, rank 0's orders, and the
threads that run torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from penstock.services.trainer.ranks.liveness import Liveness
from penstock.services.trainer.ranks.orders import Orders
from penstock.services.trainer.ranks.process_group import Place, World, join
from penstock.shared.errors import CheckpointError, RankLost

__all__ = ["Ranks", "Threads", "meet", "to_the_end"]

T = TypeVar("T")

POLL_S = 0.5
"""Interval in seconds at which a rank that carries out an order checks whether another rank failed."""
FAILED_GRACE_S = 5.0
"""Seconds that other ranks have to reach the vote after a rank failed; then they count as stuck in a collective."""


class Threads:
    """One thread for computation and one that writes checkpoints at the same time."""

    def __init__(self, *, local_rank: int = 0) -> None:
        self._torch = ThreadPoolExecutor(1, "torch", initializer=partial(_choose_device, local_rank))
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    async def compute(self, work: Any) -> Any:
        """Run ``work`` in the thread that owns the models, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)

    async def write(self, work: Any) -> Any:
        """Run ``work`` in the thread that writes to disk, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    def close(self) -> None:
        """Cancel queued work; running work continues to its end."""
        self._torch.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)


class Ranks:
    """Connections of this process to the other ranks. Jobs take turns: the job that holds ``turn`` is trained."""

    def __init__(self, world: World, threads: Threads, liveness: Liveness | None = None) -> None:
        self.world, self.threads, self.liveness = world, threads, liveness
        self.stranded = ""
        """Reason why the ranks are unusable: some wait in a collective that a failed rank never enters. '' if none."""
        self.orders = Orders(world.store, rank=world.place.rank, size=world.place.size)
        self.turn = asyncio.Lock()
        self.busy = asyncio.Lock()
        """Held while an order is carried out."""

    @property
    def place(self) -> Place:
        """Rank of this process, and the number of ranks."""
        return self.world.place

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Await this rank's part of an order and return its result. Give up once a rank has failed and
        ``FAILED_GRACE_S`` seconds have passed since.

        Raises:
            CheckpointError: a rank failed, and this one waits in a collective that the failed rank will not enter.
            RankLost: the same happened in an earlier order.
        """
        if self.stranded:
            work.close()
            raise RankLost(self.stranded)
        task = asyncio.ensure_future(work)
        failed_s = 0.0
        while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
            failure = self.liveness.failure if self.liveness is not None else ""
            failed_s = failed_s + POLL_S if failure else 0.0
            if failed_s >= FAILED_GRACE_S:
                self.stranded = f"the ranks wait for one that failed: {failure}"
                raise CheckpointError(failure)
        return await task


async def meet(place: Place, *, deadline_s: float, silence_s: float = 60.0, interval_s: float = 1.0) -> Ranks:
    """Connect to the other ranks of this trainer, or start alone if there are none.

    Args:
        deadline_s: longest wait for another rank, here and in every collective.
        silence_s: see ``Liveness``.
        interval_s: see ``Liveness``.

    Raises:
        RankLost: not all ranks connected within ``deadline_s``.
    """
    threads = Threads(local_rank=place.local_rank)
    world = await threads.compute(partial(join, place, deadline_s=deadline_s))
    liveness = None
    if place.size > 1:
        liveness = await Liveness.open(world, threads.compute, silence_s=silence_s, interval_s=interval_s)
    return Ranks(world, threads, liveness)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end even if the caller is cancelled, because other ranks take part in ``work``. Return its
    result."""
    task: Awaitable[T] = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])  # type: ignore[type-var]
        raise


def _choose_device(local_rank: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
