"""One model of a process is built at a time, by a thread or by a coroutine with its threads."""

from __future__ import annotations

import asyncio
import threading

import torch

from penstock.shared.models.building import building, building_apart


def built_by_another_thread() -> threading.Event:
    """Set once another thread could build a model."""
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


async def test_a_coroutine_builds_in_its_threads_and_nobody_else_does() -> None:
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
    """An engine that opens starts tasks, which live for as long as it does."""
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
        for _ in range(20):  # if it did not wait, it would have built by now
            await asyncio.to_thread(int)
        order.append("other")
    await asyncio.wait_for(task, 30)
    assert order == ["other", "task"]
