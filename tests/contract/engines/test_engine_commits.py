"""``rollout.on_update`` on every engine: groups in progress at an update go on, begin again, or end first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.services.rollout.commit_rule import Attempt, CommitRule
from penstock.services.rollout.group_maker import GroupMaker
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.rollout import EmbeddedConfig
from penstock.shared.data.prompts import Prompt
from penstock.shared.models import build_tokenizer
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import Ticket
from penstock.shared.protocol.trajectory import Group

SIZE = 3
Make = Callable[[Attempt], Awaitable[Group]]


def maker_of(bench: Any) -> Make:
    """Return a function that generates the group of one ticket, with completions of 240 tokens."""
    config = JobConfig.parse(
        {
            "name": "commits",
            "model": {"config": {"max_position_embeddings": 512}, "tokenizer": "char"},
            "data": {"train": {"type": "addition"}, "prompt": {"max_tokens": 8}},
            "reward": {"scorers": [{"type": "exact"}]},
            "algorithm": {"group_size": SIZE},
            "train": {"batch_size": SIZE, "max_updates": 1},
            "sampling": {"max_new_tokens": bench.length, "ignore_eos": True},
        }
    )
    maker = GroupMaker("j", "w", config, bench.engine, build_tokenizer(config.model))
    prompt = Prompt(text="", token_ids=list(bench.prompt), answer=None, row={}, too_long=False)
    ticket = Ticket(draw=Draw(0), epoch=1, deadline=0.0, min_version=0)

    async def ask(*_: object) -> Any:
        raise AssertionError("there is no environment")

    return lambda attempt: maker.make(ticket, prompt, "train:0.0", ask, attempt=attempt)


def versions(group: Group) -> list[set[int]]:
    """Return the versions of each completion; none may have failed."""
    assert not group.failed.any()
    return [{int(v) for row, v, _, _ in group.spans if row == place} for place in range(group.num_trajectories)]


async def test_keep_goes_on_under_the_new_version(bench: Any) -> None:
    rule, make = CommitRule(EmbeddedConfig(), bench.engine), maker_of(bench)
    task = asyncio.create_task(rule.make("train:0.0", make))
    await bench.until_tokens(60)
    async with rule.update(1, "d1") as waited:
        await rule.interrupt()
        assert (waited, rule.is_open) == (False, True)
        await bench.update(1, seed=1)
    assert versions(await task) == [{0, 1}] * SIZE
    assert rule.discarded_tokens == 0


async def test_restart_repeats_the_ticket_under_the_new_version(bench: Any) -> None:
    rule, make = CommitRule(EmbeddedConfig(on_update="restart"), bench.engine), maker_of(bench)
    attempts: list[Group] = []

    async def generate(attempt: Attempt) -> Group:
        attempts.append(await make(attempt))
        return attempts[-1]

    live = asyncio.create_task(bench.engine.generate(bench.ask("live")))
    task = asyncio.create_task(rule.make("train:0.0", generate))
    await bench.until_tokens(60)
    async with rule.update(1, "d1") as waited:
        await rule.interrupt()
        assert (waited, rule.is_open) == (False, False)
        await bench.update(1, seed=1)
    group = await task
    assert versions(group) == [{1}] * SIZE
    discarded, accepted = attempts
    assert accepted is group
    assert discarded.failed.all()
    assert 0 < len(discarded.token_ids) == rule.discarded_tokens < SIZE * bench.length
    assert (discarded.draw, discarded.attempt != group.attempt) == (group.draw, True)
    again = await make(Attempt())
    assert not bench.seeded or again.token_ids.tolist() == group.token_ids.tolist(), "the seeds are those of the ticket"
    [answer] = (await live).samples
    assert [span.version for span in answer.spans] == [0, 1], "live answers go on"


async def test_restart_reaches_requests_that_the_engine_does_not_know_yet(bench: Any) -> None:
    rule, make = CommitRule(EmbeddedConfig(on_update="restart"), bench.engine), maker_of(bench)
    task = asyncio.create_task(rule.make("train:0.0", make))
    await asyncio.sleep(0)  # the group has begun, and its requests have not
    before = bench.engine.generated_tokens
    async with rule.update(1, "d1"):
        await rule.interrupt()
        await bench.update(1, seed=1)
        assert bench.engine.generated_tokens == before
    assert versions(await task) == [{1}] * SIZE
    assert rule.discarded_tokens == 0


async def test_drain_lets_groups_end_and_holds_the_next_one_back(bench: Any) -> None:
    waits: list[str] = []
    opened = asyncio.Event()
    rule = CommitRule(
        EmbeddedConfig(on_update="drain", drain_s=600), bench.engine, wait=lambda key, what, subject: waits.append(key),
        done=waits.remove, on_open=opened.set,
    )  # fmt: skip
    make = maker_of(bench)

    async def late() -> Group:
        while rule.is_open:
            await asyncio.sleep(0.001)
        return await rule.make("train:1.0", make)

    first, second = asyncio.create_task(rule.make("train:0.0", make)), asyncio.create_task(late())
    await bench.until_tokens(30)
    async with rule.update(1, "d1") as waited:
        assert (waited, waits, opened.is_set()) == (True, ["train:1.0"], False)
        await bench.update(1, seed=1)
    assert versions(await first) == [{0}] * SIZE
    assert versions(await second) == [{1}] * SIZE
    assert (rule.discarded_tokens, waits, opened.is_set()) == (0, [], True)


async def test_a_drain_that_takes_too_long_keeps(bench: Any) -> None:
    rule, make = CommitRule(EmbeddedConfig(on_update="drain", drain_s=0.05), bench.engine), maker_of(bench)
    task = asyncio.create_task(rule.make("train:0.0", make))
    await bench.until_tokens(30)
    await bench.engine.pause("keep")  # so that no completion ends in time
    async with rule.update(1, "d1") as waited:
        assert (waited, rule.is_open, task.done()) == (True, True, False)
        await bench.update(1, seed=1)
    await bench.engine.resume()
    assert versions(await task) == [{0, 1}] * SIZE
    assert rule.discarded_tokens == 0
