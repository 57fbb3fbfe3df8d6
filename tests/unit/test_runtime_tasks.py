"""Deadlines, retries, background tasks, and the end of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from penstock.shared.errors import DeadlineError, Unavailable
from penstock.shared.runtime import tasks
from penstock.shared.runtime.tasks import (
    Background,
    Deadline,
    end_tasks,
    first_error,
    retry,
    together,
    unexpected,
    wait_for,
)


async def test_a_wait_that_runs_out_names_what_it_waited_for() -> None:
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for a group of job_1"):
        await wait_for(asyncio.Event().wait(), 0.05, "a group of job_1")
    assert await wait_for(asyncio.sleep(0, "value"), 1, "nothing") == "value"


async def test_an_inner_timeout_is_not_reported_as_the_deadline() -> None:
    async def inner() -> None:
        raise TimeoutError("their own")

    with pytest.raises(TimeoutError, match="their own") as caught:
        await wait_for(inner(), 1, "x")
    assert not isinstance(caught.value, DeadlineError)


def test_a_deadline_counts_down() -> None:
    deadline = Deadline(0.05)
    deadline.check("answer")
    assert 0 < deadline.left_s <= 0.05
    time.sleep(0.06)
    assert deadline.over
    with pytest.raises(DeadlineError, match=r"no answer within 0\.05 s"):
        deadline.check("answer")


async def test_unexpected_returns_the_error_also_of_a_failed_task_group() -> None:
    """Before Python 3.13 a failed task group leaves its task marked as cancelled."""

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise Unavailable("gone")

    async def group() -> None:
        async with asyncio.TaskGroup() as opening:
            opening.create_task(fail())

    for _ in range(2):
        error = await unexpected(group())
        assert error is not None
        assert repr(first_error(error)) == repr(Unavailable("gone"))
    assert await unexpected(asyncio.sleep(0)) is None


async def test_work_that_is_cancelled_has_ended_before_the_cancellation_goes_on() -> None:
    ended: list[str] = []

    async def fail_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("work")
            raise Unavailable("while it was cancelled")

    task = asyncio.create_task(unexpected(fail_at_the_end()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"]


async def test_retry_repeats_until_it_works() -> None:
    calls = 0

    async def attempt() -> int:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise Unavailable("not yet")
        return calls

    assert await retry(attempt, on=Unavailable, deadline_s=5, what="x", first_pause_s=0.001) == 4


async def test_retry_gives_up_with_the_last_reason() -> None:
    async def attempt() -> None:
        raise Unavailable("still away")

    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"connect did not succeed within 0\.2 s: still away"):
        await retry(attempt, on=Unavailable, deadline_s=0.2, what="connect", first_pause_s=0.01)
    assert time.monotonic() - start < 0.4


async def test_retry_lets_other_errors_through_and_bounds_each_attempt() -> None:
    async def broken() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await retry(broken, on=Unavailable, deadline_s=1, what="x")
    with pytest.raises(DeadlineError):
        await retry(asyncio.Event().wait, on=Unavailable, deadline_s=0.05, what="x")


async def test_background_tasks_end_with_their_block() -> None:
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Background() as background:
        task = background.spawn(forever(), name="watcher")
        await asyncio.sleep(0.01)
        assert task.get_name() == "watcher"
    assert ended.is_set()
    assert task.cancelled()


async def test_a_background_task_that_raises_ends_the_block() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        async with Background() as background:
            background.spawn(fail(), name="fails")
            await asyncio.sleep(5)


async def test_the_blocks_own_error_wins() -> None:
    with pytest.raises(KeyError):
        async with Background() as background:
            background.spawn(asyncio.sleep(5), name="x")
            raise KeyError("mine")


async def test_cancelling_the_block_cancels_its_tasks() -> None:
    inner: list[asyncio.Task[None]] = []

    async def block() -> None:
        async with Background() as background:
            inner.append(background.spawn(asyncio.sleep(5), name="x"))
            await asyncio.sleep(5)

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner[0].cancelled()


async def test_tasks_that_run_together_end_together() -> None:
    ended: list[int] = []

    async def work(number: int) -> int:
        try:
            await asyncio.sleep(60 if number < 0 else 0)
        finally:
            ended.append(number)
        if number == 3:
            raise DeadlineError("three")
        return number

    assert await together(work(number) for number in (2, 1)) == [2, 1]
    with pytest.raises(DeadlineError, match="three"):
        await together(work(number) for number in (-1, 3, -2))
    assert sorted(ended) == [-2, -1, 1, 2, 3]


async def test_a_task_whose_own_timeout_expires_at_the_same_time_is_ended() -> None:
    """The timeout takes the cancellation for its own, and the task would go on after the timeout."""
    expired = asyncio.Event()

    async def work() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                try:
                    await asyncio.Event().wait()
                finally:
                    expired.set()
                    await asyncio.sleep(0.05)
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    async with asyncio.timeout(5):
        await expired.wait()
        await end_tasks([task])
    assert task.cancelled()


async def test_a_cancellation_that_was_lost_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.13 a failing task group drops a cancellation that arrives meanwhile."""
    monkeypatch.setattr(tasks, "AGAIN_S", 0.1)
    undoing = asyncio.Event()

    async def slow_to_leave() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            undoing.set()
            await asyncio.sleep(0.02)

    async def fail() -> None:
        raise ValueError("once")

    async def work() -> None:
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(slow_to_leave())
                await asyncio.sleep(0)
                group.create_task(fail())
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    async with asyncio.timeout(5):
        await undoing.wait()
        await end_tasks([task])
    assert task.cancelled()


async def test_the_end_of_a_task_is_not_interrupted_by_another() -> None:
    cleaning, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await asyncio.sleep(0.05)
            cleaned.set()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    first = asyncio.create_task(end_tasks([task]))
    await cleaning.wait()
    first.cancel()
    await end_tasks([task])
    assert cleaned.is_set()


async def test_a_repeated_cancellation_reaches_the_work_of_unexpected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.1)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(unexpected(work()))
    async with asyncio.timeout(5):
        await begun.wait()
        await end_tasks([task])
    assert (task.cancelled(), ended.is_set()) == (True, True)
