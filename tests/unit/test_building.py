"""A process builds one model at a time: in one thread, or in one coroutine and the threads that it starts."""

from __future__ import annotations

import asyncio
import threading

import torch

from penstock.shared.models.building import building, building_apart


def built_by_another_thread() -> threading.Event:
    """Start a thread that builds a model; return an event that is set once the thread was allowed to build."""
    built = threading.Event()

    def build() -> None:
        with building():
            built.set()

    threading.Thread(target=build, daemon=True).start()
    return built


def test_builds_of_threads_exclude_each_other_and_nest() -> None:
    with building():
        built = built_by_another_thread()
        with building(1):
            pass
        assert not built.is_set()
    assert built.wait(30)


def test_random_state_is_restored() -> None:
    before = torch.random.get_rng_state()
    with building(1):
        first = torch.rand(3)
        with building(1):
            assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.random.get_rng_state(), before)


async def test_while_a_coroutine_builds_only_its_own_threads_may_build() -> None:
    def build() -> bool:
        with building():
            return not built.is_set()

    async with building_apart():
        built = built_by_another_thread()
        assert await asyncio.to_thread(build)
        assert build()
    assert await asyncio.to_thread(built.wait, 30)


async def test_a_coroutine_waits_without_blocking_its_loop() -> None:
    begun = asyncio.Event()

    async def other() -> None:
        begun.set()
        async with building_apart():
            pass

    with building():
        waiting = asyncio.create_task(other())
        await asyncio.wait_for(begun.wait(), 30)
    await asyncio.wait_for(waiting, 30)


async def test_a_task_that_outlives_its_build_waits_like_others() -> None:
    """A task that was started during a build, as by an engine that opens, must wait for later builds of others."""
    again, order = asyncio.Event(), list[str]()

    def build() -> None:
        with building():
            order.append("task")

    async def later() -> None:
        await again.wait()
        await asyncio.to_thread(build)

    async with building_apart():
        task = asyncio.create_task(later())
    async with building_apart():
        again.set()
        for _ in range(20):  # a task that does not wait would have built by now
            await asyncio.to_thread(int)
        order.append("other")
    await asyncio.wait_for(task, 30)
    assert order == ["other", "task"]
