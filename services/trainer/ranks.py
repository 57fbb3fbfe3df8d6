"""What a process keeps for models that are cut over ranks: its place, the orders, the threads that own torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from penstock.services.trainer.orders import Orders
from penstock.services.trainer.process_group import Place, World, join

__all__ = ["Ranks", "Threads", "meet", "to_the_end"]

T = TypeVar("T")


class Threads:
    """One thread that computes and one that writes checkpoints meanwhile."""

    def __init__(self, *, local_rank: int = 0) -> None:
        self._torch = ThreadPoolExecutor(1, "torch", initializer=partial(_choose_device, local_rank))
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    async def compute(self, work: Any) -> Any:
        """Run ``work`` in the thread that owns the models."""
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)

    async def write(self, work: Any) -> Any:
        """Run ``work`` in the thread that owns the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    def close(self) -> None:
        """Start nothing more; what runs goes on to its end."""
        self._torch.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)


class Ranks:
    """Of one process, for its whole life. One job at a time is trained: the one that holds ``turn``."""

    def __init__(self, world: World, threads: Threads) -> None:
        self.world, self.threads = world, threads
        self.orders = Orders(world.store, rank=world.place.rank, size=world.place.size)
        self.turn = asyncio.Lock()
        self.busy = asyncio.Lock()
        """Held while an order is carried out."""

    @property
    def place(self) -> Place:
        """Which rank this is."""
        return self.world.place


async def meet(place: Place, *, deadline_s: float) -> Ranks:
    """Meet the other ranks of this trainer, or become the only one.

    Raises:
        RankLost: they did not all come within ``deadline_s``.
    """
    threads = Threads(local_rank=place.local_rank)
    world = await threads.compute(partial(join, place, deadline_s=deadline_s))
    return Ranks(world, threads)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` without passing a cancellation on: other ranks are in the middle of the same."""
    task: Awaitable[T] = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])  # type: ignore[type-var]
        raise


def _choose_device(local_rank: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
