"""Pause, abort and sleep: their effect on running and waiting requests, and the return to work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.shared.errors import Unavailable


async def settled(task: asyncio.Task[Any]) -> bool:
    """Return True if a task ends within a moment."""
    done, _ = await asyncio.wait([task], timeout=0.05)
    return bool(done)


async def test_abort_answers_with_what_is_there(bench: Any) -> None:
    doomed = asyncio.create_task(bench.engine.generate(bench.ask("doomed", n=2)))
    other = asyncio.create_task(bench.engine.generate(bench.ask("other", max_new_tokens=60)))
    await bench.until_tokens(60)
    assert await bench.engine.abort(["doomed", "unknown"]) == 1
    for sample in (await doomed).samples:
        assert sample.finish == "abort"
        assert 0 < len(sample.token_ids) < bench.length
        assert sample.spans[-1].end == len(sample.token_ids) == len(sample.logprobs)
        assert bench.error(sample) < 1e-4
    assert (await other).samples[0].finish == "length"


async def test_abort_of_all_reaches_what_waits(bench: Any) -> None:
    """A server may have memory for a quarter of the first request only: it queues the rest, and aborts it there."""
    started: set[int] = set()
    requests = [bench.ask(str(i), n=bench.max_running, max_new_tokens=2 * bench.length) for i in range(2)]
    tasks = [
        asyncio.create_task(bench.engine.generate(each, lambda token: started.add(token.index))) for each in requests
    ]
    async with asyncio.timeout(60):
        while len(started) < bench.max_running // 4:  # a server receives the completions one by one
            await asyncio.sleep(0.001)
    begun = set(started)
    assert await bench.engine.abort() == 2
    running, waiting = [(await task).samples for task in tasks]
    assert [sample.finish for sample in [*running, *waiting]] == ["abort"] * 2 * bench.max_running
    assert all(running[index].token_ids for index in begun)
    assert all(sample.token_ids == [] and sample.spans == [] for sample in waiting)
    health = await bench.engine.health()
    assert (health["running"], health["waiting"]) == (0, 0)


async def test_abort_reaches_what_a_pause_overtook(bench: Any) -> None:
    """A server may receive a request after a pause that was sent later, and then keeps it without decoding it."""
    task = asyncio.create_task(bench.engine.generate(bench.ask("overtaken", n=bench.max_running)))
    while not bench.engine.running:
        await asyncio.sleep(0)
    await bench.engine.pause("keep")
    async with asyncio.timeout(30):
        assert await bench.engine.abort() == 1
    assert [sample.finish for sample in (await task).samples] == ["abort"] * bench.max_running
    await bench.engine.resume()
    assert len((await bench.engine.generate(bench.ask("after", max_new_tokens=5))).samples[0].token_ids) == 5


async def test_pause_keep_goes_on_where_it_stopped(bench: Any) -> None:
    whole = (await bench.engine.generate(bench.ask("whole", max_new_tokens=200, **bench.repeatable))).samples[0]
    task = asyncio.create_task(bench.engine.generate(bench.ask("kept", max_new_tokens=200, **bench.repeatable)))
    await bench.until_tokens(20)
    await bench.engine.pause("keep")
    before = bench.engine.generated_tokens
    held = asyncio.create_task(bench.engine.generate(bench.ask("held", max_new_tokens=5)))
    assert not await settled(held)
    assert bench.engine.generated_tokens == before
    assert bench.engine.running == 1
    await bench.engine.resume()
    assert (await task).samples[0].token_ids == whole.token_ids
    assert len((await held).samples[0].token_ids) == 5


async def test_pause_abort_ends_what_runs_and_holds_what_comes(bench: Any) -> None:
    task = asyncio.create_task(bench.engine.generate(bench.ask("cut")))
    await bench.until_tokens(20)
    await bench.engine.pause("abort")
    cut = (await task).samples[0]
    assert cut.finish == "abort"
    assert 20 <= len(cut.token_ids) < bench.length
    held = asyncio.create_task(bench.engine.generate(bench.ask("held", max_new_tokens=5)))
    assert not await settled(held)
    assert bench.engine.running == 0
    await bench.engine.resume()
    assert (await held).samples[0].finish == "length"


async def test_pause_drain_finishes_whole_requests_first(bench: Any) -> None:
    request = bench.ask("drained", n=bench.max_running + 3, max_new_tokens=120)  # three samples wait for a slot
    task = asyncio.create_task(bench.engine.generate(request))
    await bench.until_tokens(20)
    late = asyncio.create_task(bench.engine.generate(bench.ask("late", max_new_tokens=5)))
    await asyncio.sleep(0)
    await bench.engine.pause("drain")
    assert [len(sample.token_ids) for sample in (await task).samples] == [120] * (bench.max_running + 3)
    assert not await settled(late)
    await bench.engine.resume()
    assert len((await late).samples[0].token_ids) == 5


async def test_a_held_request_can_be_cancelled(bench: Any) -> None:
    await bench.engine.pause("keep")
    held = asyncio.create_task(bench.engine.generate(bench.ask("held")))
    assert not await settled(held)
    held.cancel()
    await asyncio.wait([held])
    await bench.engine.resume()
    assert (await bench.engine.health())["waiting"] == 0


async def test_resume_and_close_are_safe_to_repeat(bench: Any) -> None:
    await bench.engine.resume()
    await bench.engine.resume()
    await bench.engine.close()
    await bench.engine.close()


async def test_sleep_refuses_until_wake(bench: Any) -> None:
    if not bench.engine.caps.sleep:
        pytest.skip("this engine does not sleep")
    before = (await bench.engine.generate(bench.ask("before", max_new_tokens=12))).samples[0]
    task = asyncio.create_task(bench.engine.generate(bench.ask("cut")))
    await bench.until_tokens(10)
    await bench.engine.sleep()
    assert (await task).samples[0].finish == "abort"
    with pytest.raises(Unavailable, match="sleeps"):
        await bench.engine.generate(bench.ask("refused"))
    await bench.engine.wake()
    assert (await bench.engine.generate(bench.ask("after", max_new_tokens=12))).samples[0] == before


async def test_health_counts(bench: Any) -> None:
    before = bench.engine.generated_tokens
    task = asyncio.create_task(bench.engine.generate(bench.ask("x", n=2)))
    await bench.until_tokens(10)
    health = await bench.engine.health()
    assert (health["running"], health["waiting"], health["dirty"]) == (2, 0, False)
    await task
    assert bench.engine.generated_tokens - before == 2 * bench.length
