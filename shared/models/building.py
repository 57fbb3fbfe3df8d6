"""Lock for building models, because a build changes state of the whole process.

While transformers loads weights, it patches functions of torch and then restores what it found: concurrent loads
restore each other's patches, and every later model of the process is then built without data. Random seeds are global,
too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

import torch

__all__ = ["building", "building_apart"]

_POLL_S = 0.01
_one_at_a_time = threading.Lock()
_building: list[object] = []
"""List with the present owner of the lock as its only element; empty while the lock is free."""
_owner: ContextVar[object | None] = ContextVar("building", default=None)
"""Lock owner to which the running coroutine or thread belongs. Threads that a coroutine starts inherit the value."""


@contextmanager
def building(seed: int | None = None) -> Iterator[None]:
    """Hold the lock for one build, with the CPU's random generator seeded with ``seed``; restore the generator's state
    afterwards.

    Calls may be nested: the inner one uses the lock of the outer one.
    """
    if _is_held_here():
        with _seeded(seed):
            yield
        return
    with _one_at_a_time, _owned(), _seeded(seed):
        yield


@asynccontextmanager
async def building_apart() -> AsyncIterator[None]:
    """Hold the lock for a build that the body of the ``async with`` block awaits. Waiting for the lock does not block
    the event loop.

    Inside, ``building`` does not wait in the coroutine itself, in its tasks and in threads of ``asyncio.to_thread``.
    """
    while not _one_at_a_time.acquire(blocking=False):
        await asyncio.sleep(_POLL_S)
    try:
        with _owned(), _seeded(None):
            yield
    finally:
        _one_at_a_time.release()


def _is_held_here() -> bool:
    """Return True if the calling coroutine or thread belongs to the build that holds the lock now. Return False if it
    was started by a build that has ended."""
    return any(_owner.get() is owner for owner in list(_building))


@contextmanager
def _owned() -> Iterator[None]:
    """Mark the current context (``contextvars``) as the holder of the lock until the ``with`` block ends."""
    owner = object()
    _building.append(owner)
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)
        _building.clear()


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield
