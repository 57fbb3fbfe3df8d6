"""``rollout.on_update`` when a worker leaves, and when it cannot load a version."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from penstock.services.rollout.commit_rule import Attempt, CommitRule
from penstock.services.rollout.tickets import HandedOver
from penstock.shared.config.rollout import EmbeddedConfig
from penstock.shared.protocol.trajectory import Group

FAR_S = 3600.0


class Bench:
    """A commit rule with a stand-in for its engine: groups run until the rule aborts their requests."""

    def __init__(self, on_update: Any) -> None:
        self.waits: set[str] = set()
        self.rule = CommitRule(
            EmbeddedConfig(on_update=on_update, drain_s=FAR_S), self,  # type: ignore[arg-type]
            wait=lambda key, what, subject: self.waits.add(key), done=self.waits.discard,
        )  # fmt: skip
        self.begun: list[Attempt] = []
        self.ended = asyncio.Event()

    async def abort(self, request_ids: Collection[str]) -> int:
        self.ended.set()
        return len(request_ids)

    async def generate(self, attempt: Attempt) -> Group:
        self.begun.append(attempt)
        attempt.requests["r0"] = 0
        await self.ended.wait()
        attempt.requests.clear()
        group = Group.__new__(Group)
        object.__setattr__(group, "mask", np.ones(2, np.uint8))
        return group

    def make(self, key: str = "train:0.0") -> asyncio.Task[Group]:
        return asyncio.create_task(self.rule.make(key, self.generate))

    async def begin(self) -> asyncio.Task[Group]:
        """Start a group; return its task once the group runs."""
        task, before = self.make(), len(self.begun)
        await until(lambda: len(self.begun) > before)
        return task


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0)


async def update(rule: CommitRule, version: int = 1, *, interrupts: bool = True, digest: str = "d") -> bool:
    """Let the rule load ``version``, or try to; return True if the update waited for groups."""
    async with rule.update(version, digest) as waited:
        if interrupts:
            await rule.interrupt()
        return waited


async def test_a_leaving_worker_hands_over_groups_that_wait_for_an_update() -> None:
    bench = Bench("drain")
    first = await bench.begin()
    updating = asyncio.create_task(update(bench.rule))
    await until(lambda: not bench.rule.is_open)
    second = bench.make("train:1.0")
    await until(lambda: bench.waits)
    bench.rule.leave()
    with pytest.raises(HandedOver):
        await asyncio.wait_for(second, 30)
    assert not bench.waits
    assert await asyncio.wait_for(updating, 30), "the update had to wait, and the worker that leaves ends the wait"
    assert not first.done(), "a running group may end"
    bench.ended.set()
    await first
    with pytest.raises(HandedOver):
        await bench.make()
    assert len(bench.begun) == 1


async def test_a_leaving_worker_hands_over_a_group_that_was_discarded() -> None:
    bench = Bench("restart")
    task = await bench.begin()
    bench.rule.leave()
    async with bench.rule.update(1, "d"):
        await bench.rule.interrupt()
        with pytest.raises(HandedOver):
            await asyncio.wait_for(task, 30)
    assert (len(bench.begun), bench.rule.discarded_tokens) == (1, 2)


async def test_groups_are_discarded_once_for_a_version_that_cannot_be_served() -> None:
    bench = Bench("restart")
    task = await bench.begin()
    await update(bench.rule)
    bench.ended.clear()
    await until(lambda: len(bench.begun) == 2)
    first, second = bench.begun
    await update(bench.rule)
    assert (first.discarded, second.discarded, bench.ended.is_set()) == (True, False, False)
    await update(bench.rule, interrupts=False, digest="other")
    assert not second.discarded, "the version was not even staged"
    await update(bench.rule, digest="other")
    assert second.discarded
    await until(lambda: len(bench.begun) == 3)
    await task
    assert bench.rule.discarded_tokens == 4


async def test_groups_are_waited_for_once_for_a_version_that_cannot_be_loaded() -> None:
    bench = Bench("drain")
    first = await bench.begin()
    updating = asyncio.create_task(update(bench.rule))
    await until(lambda: not bench.rule.is_open)
    bench.ended.set()
    assert await updating
    await first
    bench.ended.clear()
    second = await bench.begin()
    assert not await asyncio.wait_for(update(bench.rule), 30)
    later = asyncio.create_task(update(bench.rule, 2))
    await until(lambda: not bench.rule.is_open)
    assert not second.done()
    bench.ended.set()
    assert await later
    await second
